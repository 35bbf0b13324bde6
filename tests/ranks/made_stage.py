"""Stages of hand-made templates, whose regions take as many ticks as a test says."""

from collections.abc import Sequence

from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.kernels.driver import DRIVER, TICKS, emit_driver
from buddy_pipeline.compile.kernels.step import declare_end_region, end_region
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.lowering import lower_kernel
from buddy_pipeline.compile.manifest import KV_BLOCK, PartitionPlan, Plan, Template
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.partition.layers import BlockRole
from buddy_pipeline.ranks.messages import Kind, Step, StepBuffer
from buddy_pipeline.ranks.stage import Stage, StageSizes

_TEMPLATE = "made"


class MadeStage:
    """A stage of like layers, each with one region for every entry of `ticks`.

    In a region thread t takes at least `entry · (t + 1)` ticks, so that the others wait for the
    last thread. `partial` bytes a span of the context are for its attention.
    """

    def __init__(
        self,
        layers: int,
        ticks: Sequence[int],
        threads: int,
        context: int = 32,
        partial: int = 0,
    ) -> None:
        target = host_target()
        objects = [
            compile_object([lower_kernel(emit_driver(target))], DRIVER, target),
            compile_object([lower_kernel(_template(ticks))], _TEMPLATE, target),
        ]
        self._library = Library(objects, [DRIVER, TICKS, _TEMPLATE])
        names = tuple(f"region {number}" for number in range(len(ticks)))
        sizes = StageSizes(tokens=1, rows=1, slots=1, context=context, threads=threads)
        plan = _plan(layers, names, partial)
        self.stage = Stage(plan, range(layers), BlockRole.MIDDLE, {}, self._library, sizes)
        self.stage.kv.apply([(0, KV_BLOCK, 0, 0)])
        self._buffer = StepBuffer(1, 1, 0)

    def run(self, steps: int) -> None:
        """Runs the stage on some steps."""
        for _ in range(steps):
            self.stage.run(self.step(), 0, 0)

    def step(self) -> Step:
        """A step of one token."""
        return self._buffer.begin(Kind.STEP, 0, tokens=1)


def _template(ticks: Sequence[int]) -> str:
    t = Text()
    t.line(f"func.func private @{TICKS}() -> i64")
    declare_end_region(t)
    args = [("args", "!llvm.ptr"), ("step", "!llvm.ptr"), ("tid", "i64")]
    with t.function(_TEMPLATE, args):
        one = t.constant(1)
        for count in ticks:
            wanted = t.mul(t.add("%tid", one), t.constant(count))
            end = t.add(t.call(TICKS, [], "i64"), wanted)
            with t.block("scf.while : () -> ()", "} do {"):
                now = t.call(TICKS, [], "i64")
                t.line(f"scf.condition({t.compare('slt', now, end)})")
            t.line("scf.yield")
            t.line("}")
            end_region(t)
        t.line("return")
    return str(t)


def _plan(layers: int, regions: tuple[str, ...], partial: int) -> Plan:
    template = Template(
        name=_TEMPLATE,
        symbol=_TEMPLATE,
        objects=(),
        scratch=(),
        thread_scratch=0,
        partial=partial,
        regions=regions,
    )
    partitions = tuple(
        PartitionPlan(
            name=f"layer{layer}",
            unit=str(layer),
            template=_TEMPLATE,
            inputs=(),
            outputs=(),
            parameters=(),
            constants=(),
            kv=(),
        )
        for layer in range(layers)
    )
    return Plan(
        key="",
        made_with={},
        variant="f32",
        strategy="coarse",
        sharing="templates",
        target={},
        layers=layers,
        vocab_size=0,
        driver="",
        token_input="",
        position_input="",
        result="",
        values={},
        constants={},
        templates={_TEMPLATE: template},
        partitions=partitions,
    )
