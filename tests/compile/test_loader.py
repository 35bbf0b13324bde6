"""Objects become callable code in this process, without a linker."""

import ctypes

import pytest

from buddy_pipeline.compile import loader
from buddy_pipeline.compile.loader import Library, load_openmp
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.partition.errors import UserError
from tests.compile.harness import host, kernel_object


def adder(symbol: str, calls: str = "") -> bytes:
    """`symbol(x)` = x + 1, or what `calls` gives for x, + 1."""
    t = Text()
    if calls:
        t.line(f"func.func private @{calls}(i64) -> i64")
    with t.function(symbol, [("x", "i64")], "i64"):
        x = t.call(calls, [("%x", "i64")], "i64") if calls else "%x"
        t.line(f"return {t.add(x, t.constant(1))} : i64")
    return kernel_object(str(t), symbol, host())


def call(library: Library, symbol: str, x: int) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(library.address(symbol))
    return int(function(x))


def test_objects_are_linked_with_each_other() -> None:
    library = Library([adder("bp_one"), adder("bp_two", calls="bp_one")], ["bp_two"])
    assert call(library, "bp_two", 40) == 42


def test_two_libraries_may_use_the_same_names() -> None:
    first = Library([adder("bp_same")], ["bp_same"])
    second = Library([adder("bp_base"), adder("bp_same", calls="bp_base")], ["bp_same"])
    assert (call(first, "bp_same", 0), call(second, "bp_same", 0)) == (1, 2)


def test_a_symbol_that_nobody_defines_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="bp_lonely"):
        Library([adder("bp_lonely", calls="bp_nowhere")], ["bp_lonely"])


def test_without_an_openmp_runtime_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "_openmp_candidates", lambda: ["libnothing_of_this_name.so"])
    with pytest.raises(UserError, match="intel-openmp"):
        load_openmp()
