"""Epilogues of a template's linears: the arithmetic that they do on outputs they have finished."""

from buddy_pipeline.compile.draft import Linear, Row
from buddy_pipeline.compile.kernels.linear_outputs import EPILOGUE_SIGNATURE
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.template_symbols import epilogue_symbol, island_symbol


def emit_epilogue(t: Text, item: Linear, name: str, number: int, target: Target) -> None:
    """Writes the epilogue of a template's item: its island on each token's columns of each group;
    see `linear_outputs.EPILOGUE_SIGNATURE`, of which the args table is the context."""
    island = item.epilogue
    assert island is not None
    with t.function(epilogue_symbol(name, number), EPILOGUE_SIGNATURE, private=True):
        zero, one, panel = t.constant(0), t.constant(1), t.constant(target.panel)
        arguments = [*island.inputs, *island.outputs]
        words = {a.word if isinstance(a, Row) else a for a in arguments}
        bases = {word: t.word("%context", word, "!llvm.ptr") for word in sorted(words)}

        def place(argument: Row | int, token: str, group: str) -> str:
            """Where an argument has these columns of a token, counted from the call's first."""
            if isinstance(argument, int):
                return bases[argument]
            if argument.word == item.out.word:
                row = t.gep("%outputs", t.mul(token, "%ldo"))
                width = t.constant(item.turns * target.panel)
            else:
                line = t.mul(t.add("%row", token), t.constant(argument.stride))
                row = t.gep(t.gep(bases[argument.word], line), t.mul("%group", panel))
                width = panel
            return t.gep(t.gep(row, t.mul(group, width)), argument.column)

        with t.loop(zero, "%groups", one) as group, t.loop(zero, "%rows", one) as token:
            pointers = [place(a, token.index, group.index) for a in arguments]
            symbol = island_symbol(name, island.source)
            t.call(symbol, [(pointer, "!llvm.ptr") for pointer in pointers])
        t.line("return")
