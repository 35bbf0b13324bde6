"""The writer of MLIR text: what it writes parses and says what was meant."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.lowering import load_mlir
from buddy_pipeline.compile.mlir_text import Text, join_modules, renamed


def parsed(t: Text) -> str:
    load_mlir()
    from mlir import ir

    with ir.Context():
        module = ir.Module.parse(str(t))
        assert module.operation.verify()
        return str(module)


def constant_of(value: float, kind: str) -> str:
    t = Text()
    with t.function("f", [], kind):
        t.line(f"return {t.constant(value, kind)} : {kind}")
    return parsed(t)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_float_survives_as_a_literal(value: float) -> None:
    text = constant_of(value, "f32").split("arith.constant ")[1].split(" : ")[0]
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if text.startswith("0x"):
        assert int(text, 16) == bits
    else:
        assert struct.unpack("<I", struct.pack("<f", float(text)))[0] == bits


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_integer_survives(value: int) -> None:
    assert f"arith.constant {value} : i64" in constant_of(value, "i64")


@pytest.mark.parametrize(
    ("value", "kind"), [(1.5, "vector<8xf32>"), (-3, "vector<4xi32>"), (0.0, "bf16"), (2, "f16")]
)
def test_splats_and_narrow_types(value: float, kind: str) -> None:
    assert "arith.constant" in constant_of(value, kind)


def test_loops_carry_values_and_branches_choose() -> None:
    t = Text()
    with t.function("f", [("n", "i64"), ("flag", "i1")], "i64"):
        zero, one = t.constant(0), t.constant(1)
        with t.loop(zero, "%n", one, [(zero, "i64"), (one, "i64")]) as loop:
            first, second = loop.carried
            loop.next = [second, t.add(first, second)]
        chosen = t.choose("%flag", lambda: [loop.results[0]], lambda: [one], ["i64"])
        t.line(f"return {chosen[0]} : i64")
    text = parsed(t)
    assert "iter_args" in text and "scf.if" in text


def test_statements_without_results() -> None:
    t = Text()
    with t.function("g", [("p", "!llvm.ptr")], private=True):
        t.line("return")
    with t.function("f", [("p", "!llvm.ptr"), ("n", "i64"), ("flag", "i1")]):
        with t.when("%flag"):
            t.call("g", [("%p", "!llvm.ptr")])
        t.switch("%n", {1: lambda: t.call("g", [("%p", "!llvm.ptr")]), 2: lambda: None})
        t.choose(t.is_null("%p"), list, list, [])
        with t.loop(t.constant(0), "%n", t.constant(1)):
            t.store(t.load("%p", "f32"), t.gep("%p", 3), "f32")
        t.line("return")
    text = parsed(t)
    assert "scf.index_switch" in text and "llvm.icmp" in text


def test_a_fused_multiply_add_stays_one_operation() -> None:
    t = Text()
    kind = "vector<8xf32>"
    with t.function("f", [("a", kind), ("b", kind), ("c", kind)], kind):
        t.line(f"return {t.fma('%a', '%b', '%c', kind)} : {kind}")
    assert "math.fma" in parsed(t)


def test_a_joined_module_declares_only_what_it_does_not_define() -> None:
    caller = "func.func private @kernel(i64)\nfunc.func private @far()\nfunc.func @a() {\n}\n"
    kernel = "func.func private @far()\nfunc.func @kernel(%x: i64) {\n}\n"
    joined = join_modules([caller, kernel])
    assert (
        joined == "func.func private @far()\nfunc.func @a() {\n}\nfunc.func @kernel(%x: i64) {\n}\n"
    )


def test_renamed_functions_are_called_by_their_new_names() -> None:
    outer = "func.func private @inner(i64)\nfunc.func @outer() {\ncall @inner()\ncall @far()\n}\n"
    inner = "func.func private @far()\nfunc.func @inner(%x: i64) {\n}\n"
    text = renamed([outer, inner], "p_")
    assert "call @p_inner()\ncall @far()" in text and "func.func @p_outer() {" in text
    assert "@inner(" not in text and "@p_far" not in text
