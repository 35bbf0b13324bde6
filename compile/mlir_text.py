"""A writer of MLIR text: fresh names, constants, pointers, vectors and structured loops."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

#: Bytes.
CACHE_LINE = 64


class Text:
    """The lines of one MLIR module under construction.

    Integers are `i64` throughout (sizes, indices, pointer arithmetic) so that no index casts are
    needed; memory is `!llvm.ptr` with explicit byte-free `getelementptr`s, which keeps alignment
    and aliasing in the emitter's hands.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._indent = 0
        self._names = 0

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"

    def line(self, text: str) -> None:
        """Appends one line at the current indentation."""
        self.lines.append("  " * self._indent + text)

    def op(self, text: str) -> str:
        """Appends `%new = text` and returns the new name."""
        self._names += 1
        name = f"%v{self._names}"
        self.line(f"{name} = {text}")
        return name

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Iterator[None]:
        """Indents what is written inside between `head {` and `tail`."""
        self.line(head + " {")
        self._indent += 1
        yield
        self._indent -= 1
        self.line(tail)

    @contextmanager
    def function(
        self, name: str, args: Sequence[tuple[str, str]], result: str = "", private: bool = False
    ) -> Iterator[list[str]]:
        """A `func.func`; yields the argument names. The body writes its own `return`."""
        names = [f"%{arg}" for arg, _ in args]
        signature = ", ".join(f"%{arg}: {kind}" for arg, kind in args)
        visibility = "private " if private else ""
        arrow = f" -> {result}" if result else ""
        with self.block(f"func.func {visibility}@{name}({signature}){arrow}"):
            yield names

    @contextmanager
    def loop(
        self,
        low: str,
        high: str,
        step: str,
        carried: Sequence[tuple[str, str]] = (),
    ) -> Iterator["Loop"]:
        """An `scf.for` over i64 with loop-carried values given as (initial name, type).

        The body sets `loop.next` (one name per carried value) before it ends; afterwards
        `loop.results` holds the final values.
        """
        self._names += 1
        number = self._names
        loop = Loop(f"%i{number}", [f"%c{number}_{j}" for j in range(len(carried))])
        head = ""
        if carried:
            loop.results = [f"%r{number}#{j}" for j in range(len(carried))]
            inits = ", ".join(
                f"{a} = {init}" for a, (init, _) in zip(loop.carried, carried, strict=True)
            )
            types = ", ".join(kind for _, kind in carried)
            head = f"%r{number}:{len(carried)} = "
            tail = f" iter_args({inits}) -> ({types})"
        else:
            tail = ""
        with self.block(f"{head}scf.for {loop.index} = {low} to {high} step {step}{tail} : i64"):
            yield loop
            if carried:
                types = ", ".join(kind for _, kind in carried)
                self.line(f"scf.yield {', '.join(loop.next)} : {types}")

    def choose(
        self,
        condition: str,
        then: Callable[[], list[str]],
        otherwise: Callable[[], list[str]],
        kinds: Sequence[str],
    ) -> list[str]:
        """An `scf.if` whose branches each write their operations and return the values chosen."""
        self._names += 1
        name = f"%r{self._names}"
        types = ", ".join(kinds)
        head = f"{name}:{len(kinds)} = scf.if {condition} -> ({types})" if kinds else ""
        with self.block(head or f"scf.if {condition}", "} else {"):
            self._yield(then(), types)
        self._indent += 1
        self._yield(otherwise(), types)
        self._indent -= 1
        self.line("}")
        return [f"{name}#{j}" for j in range(len(kinds))]

    def _yield(self, values: list[str], types: str) -> None:
        if values:
            self.line(f"scf.yield {', '.join(values)} : {types}")

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """An `scf.if` without results."""
        with self.block(f"scf.if {condition}"):
            yield

    def switch(self, value: str, cases: Mapping[int, Callable[[], object]]) -> None:
        """An `scf.index_switch` on an i64; values without a case do nothing."""
        self.line(f"scf.index_switch {self.op(f'arith.index_cast {value} : i64 to index')}")
        for number, body in cases.items():
            with self.block(f"case {number}"):
                body()
                self.line("scf.yield")
        with self.block("default"):
            pass

    def is_null(self, pointer: str) -> str:
        """Whether a pointer is null, as i1."""
        null = self.op("llvm.mlir.zero : !llvm.ptr")
        return self.op(f'llvm.icmp "eq" {pointer}, {null} : !llvm.ptr')

    def is_set(self, pointer: str) -> str:
        """Whether a pointer is not null, as i1."""
        null = self.op("llvm.mlir.zero : !llvm.ptr")
        return self.op(f'llvm.icmp "ne" {pointer}, {null} : !llvm.ptr')

    def constant(self, value: int | float, kind: str = "i64") -> str:
        """A scalar constant, or a splat when `kind` is a vector type."""
        element = kind.rsplit("x", 1)[-1].rstrip(">") if kind.startswith("vector") else kind
        literal = _float_literal(float(value)) if "f" in element else str(int(value))
        if kind.startswith("vector"):
            return self.op(f"arith.constant dense<{literal}> : {kind}")
        return self.op(f"arith.constant {literal} : {kind}")

    def binary(self, name: str, left: str, right: str, kind: str = "i64") -> str:
        """`name left, right : kind`, for example `arith.addi`."""
        return self.op(f"{name} {left}, {right} : {kind}")

    def add(self, left: str, right: str) -> str:
        """i64 sum."""
        return self.binary("arith.addi", left, right)

    def mul(self, left: str, right: str) -> str:
        """i64 product."""
        return self.binary("arith.muli", left, right)

    def compare(self, predicate: str, left: str, right: str, kind: str = "i64") -> str:
        """`arith.cmpi`; returns an i1."""
        return self.op(f"arith.cmpi {predicate}, {left}, {right} : {kind}")

    def select(self, condition: str, yes: str, no: str, kind: str) -> str:
        """`arith.select` with a scalar condition."""
        return self.op(f"arith.select {condition}, {yes}, {no} : {kind}")

    def gep(self, base: str, index: str | int, element: str = "f32") -> str:
        """Address of `base[index]` for elements of type `element`."""
        if isinstance(index, int):
            return self.op(
                f"llvm.getelementptr {base}[{index}] : (!llvm.ptr) -> !llvm.ptr, {element}"
            )
        return self.op(
            f"llvm.getelementptr {base}[{index}] : (!llvm.ptr, i64) -> !llvm.ptr, {element}"
        )

    def load(self, pointer: str, kind: str, align: int = 4) -> str:
        """Loads `kind` (scalar, vector or pointer) from memory aligned to `align` bytes."""
        return self.op(f"llvm.load {pointer} {{alignment = {align} : i64}} : !llvm.ptr -> {kind}")

    def store(self, value: str, pointer: str, kind: str, align: int = 4) -> None:
        """Stores `value` of type `kind`."""
        self.line(
            f"llvm.store {value}, {pointer} {{alignment = {align} : i64}} : {kind}, !llvm.ptr"
        )

    def prefetch(self, address: str, nearest: bool = False, write: bool = False) -> None:
        """Asks for the cache line at `address`, which need not be memory of ours: in the second
        cache, or in the first with `nearest`; with `write` to store there."""
        self.line(
            f'"llvm.intr.prefetch"({address}) <{{cache = 1 : i32, hint = {3 if nearest else 2} : '
            f"i32, rw = {int(write)} : i32}}> : (!llvm.ptr) -> ()"
        )

    def word(self, table: str, index: int, kind: str = "i64") -> str:
        """Loads the 8-byte word `index` of a table of i64 or pointers."""
        return self.load(self.gep(table, index, "i64"), kind, 8)

    def broadcast(self, scalar: str, vector: str, element: str = "f32") -> str:
        """A vector with every lane equal to `scalar`."""
        return self.op(f"vector.broadcast {scalar} : {element} to {vector}")

    def fma(self, left: str, right: str, addend: str, vector: str) -> str:
        """left · right + addend with one rounding (`vector.fma` would leave that to the target)."""
        return self.op(f"math.fma {left}, {right}, {addend} : {vector}")

    def function_address(self, name: str, kinds: Sequence[str]) -> str:
        """The address of a function of the module that takes `kinds` and returns nothing."""
        function = f"({', '.join(kinds)}) -> ()"
        constant = self.op(f"func.constant @{name} : {function}")
        return self.op(f"builtin.unrealized_conversion_cast {constant} : {function} to !llvm.ptr")

    def call(self, name: str, args: Sequence[tuple[str, str]], result: str = "") -> str:
        """Calls `@name`; returns the result's name when there is one."""
        values = ", ".join(value for value, _ in args)
        kinds = ", ".join(kind for _, kind in args)
        text = f"func.call @{name}({values}) : ({kinds})"
        if result:
            return self.op(f"{text} -> {result}")
        self.line(f"{text} -> ()")
        return ""


class Loop:
    """The names of one loop: its index, its carried values, and what they end as."""

    def __init__(self, index: str, carried: list[str]) -> None:
        self.index = index
        self.carried = carried
        self.next: list[str] = []
        self.results: list[str] = []


def join_modules(modules: Iterable[str]) -> str:
    """One module with the functions of several; what they all declare is declared once, and what
    one of them defines not at all."""
    lines = [line for module in modules for line in module.splitlines()]
    defined = _defined(lines)
    declared = {line: None for line in lines if (name := _declared(line)) and name not in defined}
    return "\n".join([*declared, *(line for line in lines if not _declared(line))]) + "\n"


def renamed(modules: Iterable[str], prefix: str) -> str:
    """One module of several, in which every function that they define has `prefix` before its name.

    Two such modules of one text can then be in one module.
    """
    text = join_modules(modules)
    defined = _defined(text.splitlines())

    def name(match: re.Match[str]) -> str:
        return f"@{prefix}{match[1]}" if match[1] in defined else match[0]

    return re.sub(r"@(\w+)", name, text)


_FUNCTION = re.compile(r"func\.func (?:private )?@(\w+)\(")


def _defined(lines: Iterable[str]) -> set[str]:
    """The names of the functions that have a body."""
    found = (_FUNCTION.match(line) for line in lines if line.endswith("{"))
    return {match[1] for match in found if match}


def _declared(line: str) -> str | None:
    """The name of the function that a line declares without a body."""
    match = None if line.endswith("{") else _FUNCTION.match(line)
    return match[1] if match else None


def _float_literal(value: float) -> str:
    """A float literal that MLIR parses back exactly (it wants a dot before an exponent)."""
    text = repr(value)
    if "e" in text and "." not in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}.0e{exponent}"
    return text
