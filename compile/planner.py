"""The plan of a whole model: partitions bound to templates, templates written as MLIR."""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from buddy_pipeline.compile.drafting import Drafted, Drafter
from buddy_pipeline.compile.export import ExportedModel, export_model
from buddy_pipeline.compile.islands import import_island
from buddy_pipeline.compile.kernels.driver import DRIVER, emit_driver
from buddy_pipeline.compile.manifest import Constant, PartitionPlan, Plan, Template, Value
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.templates import IslandCall, Linear, emit_template, island_symbol
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.compile.versions import source_digest
from buddy_pipeline.partition.fragments import resolve
from buddy_pipeline.partition.graph import NodeKind
from buddy_pipeline.partition.ownership import partition_graph


@dataclass(frozen=True)
class Source:
    """The MLIR of one object: the module, and the islands that are linked into it."""

    name: str
    symbol: str
    module: str
    islands: tuple[tuple[str, str], ...] = ()  # (symbol, linalg text)

    def key(self, target: Target, versions: dict[str, str]) -> str:
        """The content key: what is compiled, for which CPU, by which compilers and our source."""
        by = [sorted(versions.items()), source_digest()]
        text = json.dumps([asdict(self), target.digest(), by])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def make_plan(
    key: str, config: dict[str, Any], variant: Variant, target: Target, versions: dict[str, str]
) -> tuple[Plan, dict[str, Source]]:
    """Exports the model and plans it; returns the plan and the sources of its objects by key."""
    model = export_model(config)
    table = {node.name: node for node in model.nodes}
    partitions = partition_graph(model.nodes)
    drafter = Drafter(model, table, target, variant)
    sources: dict[str, Source] = {}
    templates: dict[str, Template] = {}
    plans: list[PartitionPlan] = []

    def add(source: Source) -> str:
        object_key = source.key(target, versions)
        sources[object_key] = source
        return object_key

    for partition in partitions:
        drafted = drafter.draft(partition)
        draft, name = drafted.draft, drafted.draft.name()
        if name not in templates:
            islands = tuple(
                (island_symbol(name, j), import_island(island, model, table))
                for j, island in enumerate(drafted.islands)
            )
            shown = "layer" if isinstance(partition.unit, int) else str(partition.unit)
            own = add(Source(f"{shown}-{name[-6:]}", name, emit_template(draft, target), islands))
            libraries = [
                add(Source(symbol, symbol, emit()))
                for symbol, emit in draft.libraries(target).items()
            ]
            templates[name] = Template(
                name=name,
                symbol=name,
                objects=(own, *libraries),
                scratch=tuple(draft.scratch),
                thread_scratch=draft.thread_scratch(target),
                partial=draft.partial(target),
                regions=tuple(_region_names(drafted)),
            )
        plans.append(
            PartitionPlan(
                name=partition.name,
                unit=str(partition.unit),
                template=name,
                inputs=drafted.inputs,
                outputs=drafted.outputs,
                parameters=tuple(draft.parameters),
                constants=drafted.constants,
                kv=tuple(draft.kv),
            )
        )
    driver = add(Source(DRIVER, DRIVER, emit_driver(target)))
    output = next(n for n in model.nodes if n.kind is NodeKind.OUTPUT)
    result = resolve(output.inputs[0], table)
    named = {n.kind: n.name for n in model.nodes}
    plan = Plan(
        key=key,
        made_with=versions,
        variant=variant.name,
        target=asdict(target),
        layers=sum(isinstance(p.unit, int) for p in partitions),
        vocab_size=drafter.value(result).elements,
        driver=driver,
        token_input=named.get(NodeKind.TOKENS, ""),
        position_input=named.get(NodeKind.POSITIONS, ""),
        result=result,
        values=dict(_values(plans, drafter)),
        constants={n: _constant(model, n) for p in plans for n in p.constants},
        templates=templates,
        partitions=tuple(plans),
        parameters=model.shapes,
    )
    return plan, sources


def _region_names(drafted: Drafted) -> Iterator[str]:
    """What people call each region of a template, such as "linear gate_proj up_proj"."""
    first_parameter = len(drafted.inputs) + len(drafted.outputs)
    for item in drafted.draft.items:
        kind = type(item).__name__.lower()
        if isinstance(item, Linear):
            parts = drafted.draft.parameters[item.weight - first_parameter].parts
            yield " ".join([kind, *(part.weight[0].split(".")[-2] for part in parts)])
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
