"""Islands of every family, compiled, against torch in float64; and named formulas against NumPy."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx import Node

from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.fx_nodes import graph_node
from buddy_pipeline.compile.islands import Island, import_island, signature
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.lowering import lower_island
from buddy_pipeline.compile.target import Target
from buddy_pipeline.partition.graph import NodeKind
from buddy_pipeline.ranks.memory_blocks import aligned_zeros
from tests.checkpoints import FAMILIES
from tests.compile.harness import host, runnable_targets
from tests.compile.models import Model, model


def run(
    text: str, target: Target, inputs: list[np.ndarray], shapes: list[tuple[int, ...]]
) -> list[np.ndarray]:
    """Calls a compiled island; checks that it leaves its inputs and what lies behind its outputs
    alone."""
    library = Library(
        [compile_object([lower_island(text, "island")], "island", target)], ["island"]
    )
    rows = []
    for value in inputs:
        row = aligned_zeros((value.size,), value.dtype)
        row[:] = value.reshape(-1)
        rows.append(row)
    outputs = []
    for shape in shapes:
        out = aligned_zeros((math.prod(shape) + 16,), np.float32)
        out.fill(np.nan)
        outputs.append(out)
    pointers = [a.ctypes.data for a in (*rows, *outputs)]
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(pointers))(library.address("island"))
    call(*pointers)
    for row, value in zip(rows, inputs, strict=True):
        assert row.tobytes() == value.tobytes(), "wrote to an input"
    for out in outputs:
        assert np.isnan(out[-16:]).all(), "wrote behind an output"
    return [out[:-16].reshape(shape) for out, shape in zip(outputs, shapes, strict=True)]


def evaluated(of: Model, island: Island, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The island's nodes run by torch, in float64 even where the model asks for float32."""
    fx_nodes = of.exported.fx
    values = {
        name: torch.from_numpy(a).double() if a.dtype == np.float32 else torch.from_numpy(a)
        for name, a in zip(island.inputs, inputs, strict=True)
    }

    def value(node: Node) -> torch.Tensor:
        if node.name not in values:
            arguments, named = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value)
            wide = [torch.float64 if a is torch.float32 else a for a in arguments]
            named = {k: v for k, v in named.items() if k not in ("device", "dtype")}
            result = node.target(*wide, **named)
            floats = isinstance(result, torch.Tensor) and result.is_floating_point()
            values[node.name] = result.double() if floats else result
        return values[node.name]

    return [value(fx_nodes[name]).numpy() for name in island.outputs]


def random_inputs(of: Model, island: Island, seed: int) -> list[np.ndarray]:
    """Activations and weights of size 1, positions below 100, constants as they are."""
    random = np.random.default_rng(seed)
    inputs = []
    for name in island.inputs:
        tensor = of.exported.fx[name].meta["val"]
        if name in of.exported.constants:
            inputs.append(of.exported.constants[name])
        elif of.table[name].kind is NodeKind.CONSTANT:
            node = of.exported.fx[name]
            kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
            inputs.append(node.target(*node.args, **kwargs).numpy())
        elif tensor.is_floating_point():
            inputs.append(random.standard_normal(tuple(tensor.shape), np.float32))
        else:
            inputs.append(random.integers(0, 100, tuple(tensor.shape), np.int64))
    return inputs


@pytest.mark.parametrize("target", runnable_targets())
@pytest.mark.parametrize("family", FAMILIES)
def test_islands_of_a_family_compute_what_torch_does(family: str, target: Target) -> None:
    of = model(family)
    for place, island in of.islands(target).items():
        shapes = [tuple(of.exported.fx[n].meta["val"].shape) for n in island.outputs]
        inputs = random_inputs(of, island, seed=1)
        wanted = evaluated(of, island, inputs)
        if island.columns:
            inputs = [first_columns(value, island.columns) for value in inputs]
            wanted = [first_columns(value, island.columns) for value in wanted]
            shapes = [(island.columns,)] * len(shapes)
        got = run(of.text(island), target, inputs, shapes)
        for result, expected in zip(got, wanted, strict=True):
            size = np.nanmax(np.abs(expected))
            difference = np.abs(result - expected)[~np.isnan(expected)]
            assert difference.max() <= 2e-6 * max(size, 1.0), place
            assert (np.isnan(result) == np.isnan(expected)).all()


def first_columns(value: np.ndarray, columns: int) -> np.ndarray:
    """What an epilogue gets of a row: as many elements, NaN behind its end; one alone as it is."""
    row = value.reshape(-1)[:columns]
    missing = (columns - row.size) * (row.size > 1)
    return np.pad(row, (0, missing), constant_values=np.nan) if missing else row


def formula(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """A function of tensors as linalg text, imported as a model's island is."""

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return function(*tensors)

    examples = tuple(torch.zeros(shape) for shape in shapes)
    graph = torch.export.export(Module(), examples, strict=False).graph_module.graph
    nodes = [graph_node(node, {}, {}) for node in graph.nodes]
    exported = ExportedModel(nodes, {n.name: n for n in graph.nodes}, {}, {}, {})
    inputs = tuple(n.name for n in graph.nodes if n.op == "placeholder")
    inside = tuple(n.name for n in graph.nodes if n.op == "call_function")
    (output,) = (n for n in graph.nodes if n.op == "output")
    outputs = tuple(n.name for n in output.all_input_nodes)
    table = {node.name: node for node in nodes}
    return import_island(Island(inside, inputs, outputs), exported, table)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    both = torch.cat((angle, angle), dim=-1)
    return x * both.cos() + turned * both.sin()


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def draw(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape, np.float32) * 3 for shape in shapes]


on_each_target = pytest.mark.parametrize("target", runnable_targets())
ROW = (1, 1, 97)


def check(target: Target, text: str, inputs: list[np.ndarray], expected: np.ndarray) -> None:
    (got,) = run(text, target, inputs, [expected.shape])
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


@on_each_target
def test_rms_norm(target: Target) -> None:
    x, weight = inputs = draw(ROW, (97,))
    wide = x.astype(np.float64)
    expected = weight * wide / np.sqrt((wide**2).mean() + 1e-5)
    check(target, formula(rms_norm, ROW, (97,)), inputs, expected)


@on_each_target
def test_layer_norm(target: Target) -> None:
    x, weight, bias = inputs = draw(ROW, (97,), (97,))
    wide = x.astype(np.float64) + 5.0
    inputs[0] = wide.astype(np.float32)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5) * weight + bias

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (97,), weight, bias, 1e-5)

    check(target, formula(function, ROW, (97,), (97,)), inputs, expected)


@on_each_target
def test_rotation(target: Target) -> None:
    x, angle = inputs = draw((1, 5, 1, 38), (1, 1, 1, 19))
    angle *= 300
    wide, turn = x.astype(np.float64), np.concatenate([angle, angle], -1).astype(np.float64)
    turned = np.concatenate([-wide[..., 19:], wide[..., :19]], -1)
    expected = wide * np.cos(turn) + turned * np.sin(turn)
    check(target, formula(rotate, x.shape, angle.shape), inputs, expected)


@on_each_target
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(target: Target, approximate: str) -> None:
    (x,) = inputs = draw(ROW)
    wide = x.astype(np.float64)
    if approximate == "tanh":
        inner = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    else:
        inner = np.array([math.erf(v / math.sqrt(2)) for v in wide.reshape(-1)]).reshape(ROW)
    text = formula(lambda x: torch.nn.functional.gelu(x, approximate=approximate), ROW)
    check(target, text, inputs, wide / 2 * (1 + inner))


@on_each_target
def test_swiglu_from_end_to_end_of_float32(target: Target) -> None:
    gate, up = draw(ROW, ROW)
    gate[0, 0, :7] = [-np.inf, -1e30, -100, 0, 100, 1e30, np.inf]
    up[0, 0, :7] = 1
    gate[0, 0, 9], up[0, 0, 11] = np.nan, np.nan
    (got,) = run(formula(swiglu, ROW, ROW), target, [gate, up], [ROW])
    wide = gate[0, 0, 12:].astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up[0, 0, 12:]
    assert np.abs(got[0, 0, 12:] - expected).max() <= 1e-6 * np.abs(expected).max()
    first = got[0, 0, :7]
    assert np.isnan(first[0])  # -inf · 0, as torch has it
    assert (first[1:3] == 0).all() or np.abs(first[1:3]).max() < 1e-30
    assert (first[3:] == [0, 100, np.float32(1e30), np.inf]).all()
    assert np.flatnonzero(np.isnan(got[0, 0])).tolist() == [0, 9, 11]


def test_a_sum_has_the_same_bits_for_the_same_row_every_time() -> None:
    text, target = formula(rms_norm, ROW, (97,)), host()
    inputs = draw(ROW, (97,))
    first, again = (run(text, target, inputs, [ROW])[0] for _ in range(2))
    assert (first == again).all()


def test_structure_decides_the_signature_not_names() -> None:
    of = model("llama")
    drafts = of.drafts(host())
    first, second = (drafts[f"layer{i}"].bound.islands for i in (0, 1))
    assert [i.nodes for i in first] != [i.nodes for i in second]
    table, exported = of.table, of.exported
    assert [signature(i, exported, table) for i in first] == [
        signature(i, exported, table) for i in second
    ]
    assert len({signature(i, exported, table) for i in first}) == len(first)
