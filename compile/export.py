"""Exporting a model: transformers' own class on the meta device to an FX graph of ONE token.

Outside attention a causal decoder treats every token alone, so a graph of one token describes all.
The cache never appears: attention is one custom op, whose kernel owns it.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from buddy_pipeline.compile.attention_op import plain_masks
from buddy_pipeline.compile.functional import make_functional
from buddy_pipeline.compile.fx_nodes import (
    check_sizes,
    graph_node,
    is_identity,
    module_path,
    product_as_linear,
    share_position_values,
    simplify_count,
)
from buddy_pipeline.compile.meta_model import build_on_meta, one_line
from buddy_pipeline.compile.scatter import compare_places
from buddy_pipeline.compile.top_k_op import split_top_k
from buddy_pipeline.compile.tracing import GraphOfOneToken, TracingCache
from buddy_pipeline.compile.weight_names import names_in_files
from buddy_pipeline.compile.written_attention import fold_written_attention
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import GraphNode, NodeKind

#: What `forward` calls its cache, the newest name first.
_CACHE_NAMES = ("cache", "past_key_values")


@dataclass(frozen=True)
class ExportedModel:
    """A model's graph: `nodes` as plain data in execution order, and what stands behind each.

    `parameters` maps a placeholder to the checkpoint names of its tensor (several where it is
    tied), `constants` maps a placeholder to the value of a buffer. `shapes` has every parameter's
    checkpoint name and shape.
    """

    nodes: list[GraphNode]
    fx: dict[str, Node]
    parameters: dict[str, tuple[str, ...]]
    constants: dict[str, np.ndarray]
    shapes: dict[str, tuple[int, ...]]


def export_model(config: dict[str, Any]) -> ExportedModel:
    """Exports the causal language model that a Hugging Face config.json describes.

    Raises UserError when transformers does not know the model type or the model does something
    that a pipeline of single-token graphs cannot express.
    """
    model, buffers = build_on_meta(config)
    program = _trace(model, config)
    graph = program.graph_module.graph
    _drop_what_computes_nothing(graph)
    parameters, constants = _loaded(program, model, buffers)
    constants.update(fold_written_attention(graph, constants))
    for node in graph.nodes:
        simplify_count(node)
        product_as_linear(node, parameters)
    share_position_values(graph, constants)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        check_sizes(node)
    fx = {node.name: node for node in graph.nodes}
    nodes = [graph_node(node, parameters, constants) for node in graph.nodes]
    used = {name for node in nodes for name in node.inputs}
    nodes = [n for n in nodes if n.kind is NodeKind.OUTPUT or n.name in used]
    shapes = {names[0]: tuple(fx[p].meta["val"].shape) for p, names in parameters.items()}
    return ExportedModel(nodes, fx, parameters, constants, shapes)


def _drop_what_computes_nothing(graph: torch.fx.Graph) -> None:
    """Leaves nodes without effects, of which each one's value is read and is not its input's."""
    split_top_k(graph)
    make_functional(graph)
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif is_identity(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
    compare_places(graph)
    graph.eliminate_dead_code()


def _loaded(
    program: torch.export.ExportedProgram,
    model: torch.nn.Module,
    buffers: Mapping[str, np.ndarray],
) -> tuple[dict[str, tuple[str, ...]], dict[str, np.ndarray]]:
    """By placeholder: names in the checkpoint of what comes from there, and values of the rest."""
    signature = program.graph_signature
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    in_file = names_in_files(model)
    names_of = {
        name: tuple(dict.fromkeys([*names, *map(in_file, names)]))
        for names in aliases.values()
        for name in names
    }
    parameters, constants = {}, {}
    for placeholder, target in signature.inputs_to_parameters.items():
        parameters[placeholder] = names_of[target.removeprefix("model.")]
    saved = model.state_dict().keys()
    for placeholder, target in signature.inputs_to_buffers.items():
        name = target.removeprefix("model.")
        if name in saved and buffers[name].dtype == np.float32:
            # Trained, though not by gradients.
            parameters[placeholder] = tuple(dict.fromkeys([name, in_file(name)]))
        else:
            constants[placeholder] = buffers[name]
    for placeholder, target in signature.inputs_to_lifted_tensor_constants.items():
        if program.constants[target].is_meta:
            nodes = program.graph_module.graph.nodes
            reader = next(iter(next(n for n in nodes if n.name == placeholder).users))
            raise UserError(
                f"node {reader.name} of module '{module_path(reader)}' reads a tensor that the "
                "model makes of numbers while it runs, which has no kernel yet"
            )
        constants[placeholder] = program.constants[target].numpy()
    return parameters, constants


class _OneToken(torch.nn.Module):
    """The model as a function of token ids and positions, both [1, 1], to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        takes = _arguments_of(model)
        # Classes that count from a padding id on make positions of ids, and of the cache's length.
        counts = any(hasattr(m, "create_position_ids_from_input_ids") for m in model.modules())
        self._gives_positions = "position_ids" in takes and not counts
        self._takes_mask = "attention_mask" in takes
        self._cache = next((name for name in _CACHE_NAMES if name in takes), None)
        if self._cache is None and not self._gives_positions:
            raise UserError(
                f"{type(model).__name__} takes neither positions nor a cache, so it cannot be told "
                "where its token is"
            )

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [1, 1, vocab] of one token."""
        given: dict[str, Any] = {}
        if self._gives_positions:
            given["position_ids"] = positions
        elif self._takes_mask:
            # The padding of the token alone: else classes make one of all the cache's length.
            given["attention_mask"] = torch.ones(1, 1, dtype=torch.long, device=ids.device)
        if self._cache is not None:
            given[self._cache] = TracingCache(0 if self._gives_positions else positions[0, 0])
        with GraphOfOneToken():
            return self.model(input_ids=ids, use_cache=False, **given).logits


def _arguments_of(model: torch.nn.Module) -> set[str]:
    """Names that the model's call takes, with those that it passes on to the layers' model."""
    own = inspect.signature(model.forward).parameters
    base = getattr(model, "base_model", model)
    passes_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
    return {*own, *(inspect.signature(base.forward).parameters if passes_on else ())}


def _trace(model: torch.nn.Module, config: dict[str, Any]) -> torch.export.ExportedProgram:
    """torch.export with the messages of a failed export turned into one line."""
    # Two tensors: one object for both inputs would make them one value in the graph.
    ids, positions = (torch.zeros(1, 1, dtype=torch.long, device="meta") for _ in range(2))
    module = _OneToken(model)
    with torch.no_grad(), warnings.catch_warnings(), plain_masks(), _trail(model) as running:
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(module, (ids, positions), strict=False)
        except UserError as error:
            raise UserError(f"{running()}: {error}") from error
        except Exception as error:
            # Whatever a model's own Python raises under tracing means the same to the user.
            raise UserError(
                f"{running()} of model type '{config.get('model_type')}' cannot be exported as a "
                f"graph of one token: {one_line(error)}"
            ) from error


@contextlib.contextmanager
def _trail(model: torch.nn.Module) -> Iterator[Callable[[], str]]:
    """Follows which module runs; the function says which one does, or did when an error came."""
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )

    names = {id(module): name for name, module in model.named_modules()}
    running: list[torch.nn.Module] = []

    def leave(module: torch.nn.Module, *_: Any) -> None:
        while running and running.pop() is not module:
            pass  # what a caught error ended

    def innermost() -> str:
        module = running[-1] if running else model
        return f"module '{names.get(id(module), '')}' ({type(module).__name__})"

    hooks = [
        register_module_forward_pre_hook(lambda module, _: running.append(module)),
        register_module_forward_hook(leave),
    ]
    try:
        yield innermost
    finally:
        for hook in hooks:
            hook.remove()
