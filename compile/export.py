"""Exporting a model: transformers' own class on the meta device to an FX graph of ONE token.

Outside attention a causal decoder treats every token alone, so a graph of one token describes all.
The cache never appears: attention is one custom op, whose kernel owns it.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from buddy_pipeline.compile.attention_op import register_attention
from buddy_pipeline.compile.experts_op import register_experts
from buddy_pipeline.compile.functional import make_functional
from buddy_pipeline.compile.fx_nodes import graph_node, is_identity
from buddy_pipeline.compile.scatter import compare_places
from buddy_pipeline.compile.top_k_op import split_top_k
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import GraphNode, NodeKind

#: Characters of a reason that transformers or torch gives; some list every model there is.
_LONGEST_REASON = 300


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
    model, buffers = _build(config)
    program = _trace(model, config)
    graph = program.graph_module.graph
    signature = program.graph_signature
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

    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names_of = {name: tuple(names) for names in aliases.values() for name in names}
    parameters, constants = {}, {}
    for placeholder, target in signature.inputs_to_parameters.items():
        parameters[placeholder] = names_of[target.removeprefix("model.")]
    for placeholder, target in signature.inputs_to_buffers.items():
        constants[placeholder] = buffers[target.removeprefix("model.")]
    for placeholder, target in signature.inputs_to_lifted_tensor_constants.items():
        constants[placeholder] = program.constants[target].numpy()

    fx = {node.name: node for node in graph.nodes}
    nodes = [graph_node(node, parameters, constants) for node in graph.nodes]
    used = {name for node in nodes for name in node.inputs}
    nodes = [n for n in nodes if n.kind is NodeKind.OUTPUT or n.name in used]
    shapes = {names[0]: tuple(fx[p].meta["val"].shape) for p, names in parameters.items()}
    return ExportedModel(nodes, fx, parameters, constants, shapes)


class _OneToken(torch.nn.Module):
    """The model as a function of token ids and positions, both [1, 1], to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [1, 1, vocab] of one token."""
        return self.model(input_ids=ids, position_ids=positions, use_cache=False).logits


def _build(config: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """The model on the meta device, and the values of its buffers."""
    import transformers
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
    )
    from transformers.initialization import no_init_weights

    fields = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise UserError(
            "the model's config.json has no 'model_type'; add the one it was saved with"
        )
    fields.pop("quantization_config", None)
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"model type '{model_type}' is not known to the installed transformers "
            f"{transformers.__version__}; correct it in config.json, or install a version that "
            "knows it"
        )
    try:
        settings = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        # Each class checks its entries in its own way, or trips over them.
        raise UserError(_unusable(model_type, error)) from error
    if type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model type '{model_type}' has no causal language model in transformers; only such "
            "models run here"
        )
    with no_init_weights(), _parameters_on_meta():
        try:
            model = AutoModelForCausalLM.from_config(
                settings,
                attn_implementation=register_attention(),
                experts_implementation=register_experts(),
                dtype=torch.float32,
            ).eval()
        except Exception as error:
            raise UserError(_unusable(model_type, error)) from error
    buffers = {
        name: buffer.detach().cpu().numpy()
        for name, buffer in model.named_buffers()
        if not buffer.is_meta
    }
    model.to("meta")
    model.tie_weights()  # moving the parameters has untied them
    return model, buffers


def _trace(model: torch.nn.Module, config: dict[str, Any]) -> torch.export.ExportedProgram:
    """torch.export with the messages of a failed export turned into one line."""
    # Two tensors: one object for both inputs would make them one value in the graph.
    ids, positions = (torch.zeros(1, 1, dtype=torch.long, device="meta") for _ in range(2))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(_OneToken(model), (ids, positions), strict=False)
    except UserError:
        raise
    except Exception as error:
        # Whatever a model's own Python raises under tracing means the same to the user.
        raise UserError(
            f"model type '{config.get('model_type')}' cannot be exported as a graph of one token: "
            f"{_one_line(error)}"
        ) from error


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters are moved to the meta device as they are made; buffers keep their values."""
    register = torch.nn.Module.register_parameter

    def register_meta(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _unusable(model_type: str, error: Exception) -> str:
    return (
        f"the model's config.json does not describe a model of type '{model_type}' that "
        f"transformers can build: {_one_line(error)}"
    )


def _one_line(error: Exception) -> str:
    """An error's type and message, cut where it would fill the screen."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST_REASON]}"
