"""The plan of a whole model: partitions bound to templates, templates written as MLIR."""

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from buddy_pipeline.compile.draft import Draft, ExpertLinear, IslandCall, Linear
from buddy_pipeline.compile.drafting import Drafted, Drafter
from buddy_pipeline.compile.early_sources import driver_source
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.compile.islands import Island, import_island
from buddy_pipeline.compile.manifest import Constant, PartitionPlan, Plan, Template, Value
from buddy_pipeline.compile.mlir_text import join_modules, renamed
from buddy_pipeline.compile.source import Source
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.template_kernels import (
    draft_kernels,
    draft_libraries,
    partial_result,
    thread_scratch,
)
from buddy_pipeline.compile.template_symbols import instance_prefix, island_symbol
from buddy_pipeline.compile.templates import emit_template
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.partition.fragments import resolve
from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition
from buddy_pipeline.partition.ownership import partition_graph
from buddy_pipeline.partition.strategies import layer_splitter


@dataclass(frozen=True)
class Planned:
    """A plan and the sources of its objects by key."""

    plan: Plan
    sources: dict[str, Source]


Ready = Callable[[str, Mapping[str, Source]], None]
"""Called with a partition's unit and sources, by key, that its rank needs, as they become known."""


def make_plan(
    key: str,
    model: ExportedModel,
    config: Mapping[str, Any],
    variant: Variant,
    granularity: Granularity,
    target: Target,
    versions: Mapping[str, str],
    ready: Ready = lambda unit, sources: None,
) -> Planned:
    """Cuts an exported model, binds its partitions to templates and writes those as MLIR."""
    table = {node.name: node for node in model.nodes}
    splitter = layer_splitter(granularity.strategy, str(config["model_type"]))
    partitions = partition_graph(model.nodes, splitter)
    drafter = Drafter(model, table, target, variant)
    code = _Code(model, table, target, versions, granularity.sharing, ready)
    plans: list[PartitionPlan] = []
    for number, partition in enumerate(partitions):
        drafted = drafter.draft(partition)
        plans.append(
            PartitionPlan(
                name=partition.name,
                unit=str(partition.unit),
                template=code.template(drafted, partition, number),
                inputs=drafted.bound.inputs,
                outputs=drafted.bound.outputs,
                parameters=tuple(drafted.bound.parameters),
                constants=drafted.bound.constants,
                kv=tuple(drafted.draft.kv),
            )
        )
    code.close()
    driver = code.add(driver_source(target))
    output = next(n for n in model.nodes if n.kind is NodeKind.OUTPUT)
    result = resolve(output.inputs[0], table)
    named = {n.kind: n.name for n in model.nodes}
    plan = Plan(
        key=key,
        made_with=dict(versions),
        variant=variant.name,
        strategy=granularity.strategy,
        sharing=granularity.sharing.value,
        target=asdict(target),
        layers=len({p.unit for p in partitions if isinstance(p.unit, int)}),
        vocab_size=drafter.value(result).elements,
        driver=driver,
        token_input=named.get(NodeKind.TOKENS, ""),
        position_input=named.get(NodeKind.POSITIONS, ""),
        result=result,
        values=dict(_values(plans, drafter)),
        constants={n: _constant(model, n) for p in plans for n in p.constants},
        templates=code.templates,
        partitions=tuple(plans),
        parameters=model.shapes,
    )
    return Planned(plan, code.sources)


class _Code:
    """The templates and sources of one plan, as its partitions come."""

    def __init__(
        self,
        model: ExportedModel,
        table: Mapping[str, GraphNode],
        target: Target,
        versions: Mapping[str, str],
        sharing: Sharing,
        ready: Ready,
    ) -> None:
        self.templates: dict[str, Template] = {}
        self.sources: dict[str, Source] = {}
        self._model = model
        self._table = table
        self._target = target
        self._versions = versions
        self._sharing = sharing
        self._ready = ready
        self._whole: list[Source] = []
        self._imported: dict[str, str] = {}  # an island's structure: its MLIR

    def add(self, source: Source) -> str:
        """Notes a source; returns its object's key."""
        key = source.key(self._target, self._versions)
        self.sources[key] = source
        return key

    def template(self, drafted: Drafted, partition: Partition, number: int) -> str:
        """The name of the template that runs this partition, made if it is new."""
        draft = drafted.draft
        shared = self._sharing is Sharing.TEMPLATES
        name = draft.name() if shared else f"subgraph0_{number}"
        if name in self.templates:
            self._announce(partition, self.templates[name].objects)
            return name
        whole = self._sharing is Sharing.WHOLE_GRAPH
        libraries = []
        if whole:
            self._whole += self._instances(draft, name)
        else:
            libraries = [
                self.add(Source(symbol, (symbol,), kernel.emit()))
                for symbol, kernel in draft_libraries(draft, self._target).items()
            ]
        self._announce(partition, libraries)
        islands = tuple(
            (island_symbol(name, j), self._import(island, structure))
            for j, (island, structure) in enumerate(
                zip(drafted.bound.islands, draft.islands, strict=True)
            )
        )
        shown = f"{_kind(partition)}-{name[-6:]}" if shared else name
        module = emit_template(draft, name, self._target, instances=whole)
        source = Source(shown, (name,), module, islands)
        if whole or self._sharing is Sharing.KERNELS:
            self._whole.append(source)
            own = ""  # the one object is known when all its functions are
        else:
            own = self.add(source)
            self._announce(partition, [own])
        self.templates[name] = Template(
            name=name,
            symbol=name,
            objects=(own, *libraries),
            scratch=tuple(draft.scratch),
            thread_scratch=thread_scratch(draft, self._target),
            partial=partial_result(draft, self._target),
            regions=tuple(_region_names(drafted)),
        )
        return name

    def _instances(self, draft: Draft, name: str) -> Iterator[Source]:
        """The kernels of a template's items, one for each as if no other node had the same."""
        for number, kernel in draft_kernels(draft, self._target):
            modules = [each.emit() for each in (*kernel.calls, kernel)]
            prefix = instance_prefix(name, number)
            yield Source(prefix + kernel.symbol, (), renamed(modules, prefix))

    def _import(self, island: Island, structure: str) -> str:
        """An island's MLIR; islands of one structure have the same, and are imported once."""
        if structure not in self._imported:
            self._imported[structure] = import_island(island, self._model, self._table)
        return self._imported[structure]

    def _announce(self, partition: Partition, keys: Sequence[str]) -> None:
        """Says which sources a partition's rank can build now."""
        self._ready(str(partition.unit), {key: self.sources[key] for key in keys if key})

    def close(self) -> None:
        """Puts the functions of a whole graph into one module, what is not shared too."""
        if not self._whole:
            return
        whole = Source(
            name="whole_graph",
            symbols=tuple(symbol for source in self._whole for symbol in source.symbols),
            module=join_modules(source.module for source in self._whole),
            islands=tuple(island for source in self._whole for island in source.islands),
        )
        key = self.add(whole)
        self.templates = {
            name: replace(template, objects=(key, *template.objects[1:]))
            for name, template in self.templates.items()
        }


def _kind(partition: Partition) -> str:
    """What a template is called by in file names: "prelude", "layer", "layer.self_attn"."""
    return re.sub(r"^layer\d+", "layer", partition.name)


def _region_names(drafted: Drafted) -> Iterator[str]:
    """What people call each region of a template, such as "linear gate_proj up_proj"."""
    first_parameter = len(drafted.bound.passed)
    for item in drafted.draft.items:
        kind = type(item).__name__.lower()
        if isinstance(item, Linear):
            parts = drafted.bound.parameters[item.weight - first_parameter].parts
            names = [kind, *(part.weight[0].split(".")[-2] for part in parts)]
            if item.epilogue is not None:
                names.append(f"with island {item.epilogue.source}")
            yield " ".join(names)
        elif isinstance(item, ExpertLinear):
            (part,) = drafted.bound.parameters[item.weight - first_parameter].parts
            yield f"experts {part.weight[0].split('.')[-1]}"
        elif isinstance(item, IslandCall):
            yield f"island {item.source}"
        else:
            yield kind


def _values(plans: list[PartitionPlan], drafter: Drafter) -> Iterator[tuple[str, Value]]:
    """Every value that passes between partitions."""
    for plan in plans:
        for name in (*plan.inputs, *plan.outputs):
            yield name, drafter.value(name)


def _constant(model: ExportedModel, name: str) -> Constant:
    value = model.constants.get(name)
    if value is None:
        value = _evaluate(model, name)
    data = np.ascontiguousarray(value)
    encoded = base64.b64encode(data.tobytes()).decode()
    return Constant(str(data.dtype), tuple(data.shape), encoded)


def _evaluate(model: ExportedModel, name: str) -> np.ndarray:
    """The value of a node without inputs (`aten.full`, `aten.arange`, …), made on the CPU."""
    node = model.fx[name]
    kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
    result = node.target(*node.args, **kwargs, device=torch.device("cpu"))  # type: ignore[operator]
    return result.numpy()
