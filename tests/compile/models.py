"""Tiny models exported once a session, their partitions, drafts and islands."""

import functools
from typing import Any

from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.drafting import Drafted, Drafter
from buddy_pipeline.compile.export import ExportedModel, export_model
from buddy_pipeline.compile.granularity import COARSE_TEMPLATES, Granularity
from buddy_pipeline.compile.islands import Island, import_island, signature
from buddy_pipeline.compile.kernels.driver import DRIVER, TICKS
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.lowering import lower_island, lower_kernel
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.planner import make_plan
from buddy_pipeline.compile.source import Source
from buddy_pipeline.compile.target import Target, host_target
from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.partition.graph import GraphNode
from buddy_pipeline.partition.ownership import partition_graph
from tests.checkpoints import tiny_config

#: Sizes of a real model, whose loops are long enough for vectors; nothing is left over behind them.
LARGE_LLAMA = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
}


class Model:
    """An exported model and what is made of it."""

    def __init__(self, family: str, **overrides: Any) -> None:
        self.config = tiny_config(family, **overrides)
        self.exported: ExportedModel = export_model(self.config)
        self.table: dict[str, GraphNode] = {n.name: n for n in self.exported.nodes}
        self.partitions = partition_graph(self.exported.nodes)
        self._texts: dict[str, str] = {}

    def drafts(self, target: Target, variant: str = "f32") -> dict[str, Drafted]:
        """The draft of each partition, by its name."""
        drafter = Drafter(self.exported, self.table, target, VARIANTS[variant])
        return {p.name: drafter.draft(p) for p in self.partitions}

    def islands(self, target: Target) -> dict[str, Island]:
        """The islands of different structure, by what they are: "layer0.1" is the second of the
        first layer."""
        found: dict[str, Island] = {}
        seen = set()
        for partition, drafted in self.drafts(target).items():
            for number, island in enumerate(drafted.bound.islands):
                structure = signature(island, self.exported, self.table)
                if structure not in seen:
                    seen.add(structure)
                    found[f"{partition}.{number}"] = island
        return found

    def text(self, island: Island) -> str:
        """The island's linalg, as torch-mlir imports it."""
        structure = signature(island, self.exported, self.table)
        if structure not in self._texts:
            self._texts[structure] = import_island(island, self.exported, self.table)
        return self._texts[structure]


@functools.cache
def model(family: str) -> Model:
    """The tiny model of a family."""
    return Model(family)


@functools.cache
def large_llama() -> Model:
    """A llama of a real model's sizes; nothing of it is ever allocated."""
    return Model("llama", **LARGE_LLAMA)


@functools.cache
def planned(
    family: str,
    variant: str = "f32",
    granularity: Granularity = COARSE_TEMPLATES,
    **overrides: Any,
) -> tuple[Plan, dict[str, Source]]:
    """The plan of a tiny model for the host, and the sources of its objects."""
    config = tiny_config(family, **overrides)
    exported = export_model(config) if overrides else model(family).exported
    made = make_plan(
        "key", exported, config, VARIANTS[variant], granularity, host_target(), {"compiler": "1"}
    )
    return made.plan, made.sources


def plan(family: str) -> Plan:
    """The plan of a tiny model for the host."""
    return planned(family)[0]


@functools.cache
def library(family: str, variant: str = "f32") -> Library:
    """All compiled code of a tiny model, for the host, in this process."""
    made, sources = planned(family, variant)
    objects = [_object(source) for source in sources.values()]
    symbols = [template.symbol for template in made.templates.values()]
    return Library(objects, [DRIVER, TICKS, *symbols])


@functools.cache
def _object(source: Source) -> bytes:
    modules = [lower_kernel(source.module)]
    modules += [lower_island(text, symbol) for symbol, text in source.islands]
    return compile_object(modules, source.symbols, host_target())
