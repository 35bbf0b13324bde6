"""Constants in islands: what repeats one value takes no room in the object."""

import pytest

from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.lowering import lower_island
from buddy_pipeline.compile.target import host_target

ELEMENTS = 1 << 18


def object_of(body: str, result: str) -> bytes:
    text = f"module {{ func.func @main(%a: tensor<16xf32>) -> {result} {{\n{body}\n}} }}"
    return compile_object([lower_island(text, "island")], ["island"], host_target())


@pytest.mark.parametrize("value", ["0.000000e+00", "1.500000e+00", "0xFF800000"])
def test_a_large_constant_of_one_value_is_filled_in(value: str) -> None:
    kind = f"tensor<{ELEMENTS}xf32>"
    built = object_of(
        f"%c = arith.constant dense<{value}> : {kind}\n"
        f"%r = tensor.insert_slice %a into %c[32] [16] [1] : tensor<16xf32> into {kind}\n"
        f"return %r : {kind}",
        kind,
    )
    assert len(built) < 8192 < 4 * ELEMENTS


def test_a_constant_of_different_values_is_kept() -> None:
    values = ", ".join(f"{i}.0" for i in range(16))
    built = object_of(
        f"%c = arith.constant dense<[{values}]> : tensor<16xf32>\n"
        "%e = tensor.empty() : tensor<16xf32>\n"
        "%r = linalg.add ins(%a, %c : tensor<16xf32>, tensor<16xf32>)"
        " outs(%e : tensor<16xf32>) -> tensor<16xf32>\n"
        "return %r : tensor<16xf32>",
        "tensor<16xf32>",
    )
    assert b"island" in built
