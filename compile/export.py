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

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import GraphNode, NodeKind

_ATTENTION = "buddy_pipeline"


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
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
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
    nodes = [_graph_node(node, parameters, constants) for node in graph.nodes]
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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    _register_attention()
    fields = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise UserError(
            "the model's config.json has no 'model_type'; add the one it was saved with"
        )
    fields.pop("quantization_config", None)
    try:
        settings = AutoConfig.for_model(model_type, **fields)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"model type '{model_type}' is not known to the installed transformers: {_first(error)}"
        ) from error
    with no_init_weights(), _parameters_on_meta():
        try:
            model = AutoModelForCausalLM.from_config(
                settings, attn_implementation=_ATTENTION, dtype=torch.float32
            ).eval()
        except ValueError as error:
            raise UserError(
                f"model type '{model_type}' has no causal language model: {_first(error)}"
            ) from error
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
            f"{type(error).__name__}: {_first(error)}"
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

    torch.nn.Module.register_parameter = register_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _first(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# The attention op: what transformers' classes call instead of computing attention.


@torch.library.custom_op("bp::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of one layer: query [1, heads, 1, key], key [1, kv heads, 1, key], value
    [1, kv heads, 1, value] to [1, 1, heads, value]. Only traced, never run."""
    raise RuntimeError("bp::attention is compiled to a kernel and has no eager implementation")


@attention.register_fake
def _(query, key, value, layer, scale, window, softcap):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_ATTENTION, _attention_function)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature on top of the custom op."""
    unknown = sorted(
        name
        for name, given in kwargs.items()
        if given is not None and name not in _HARMLESS_ARGUMENTS
    )
    where = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if unknown:
        raise UserError(f"attention of {where} uses {', '.join(unknown)}, which has no kernel yet")
    if attention_mask is not None:
        raise UserError(f"attention of {where} is given a mask of its own, which has no kernel yet")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UserError(f"attention of {where} is not causal; only causal decoders run here")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    result = torch.ops.bp.attention(
        query,
        key,
        value,
        int(module.layer_idx),  # type: ignore[arg-type]
        float(scale),
        int(sliding_window or 0),
        float(softcap or 0.0),
    )
    return result, None


#: Keyword arguments that models pass along and that change nothing for one causal token.
_HARMLESS_ARGUMENTS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "layer_idx",
    "position_embeddings",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


# FX nodes as plain graph nodes.


def _graph_node(
    node: Node, parameters: dict[str, tuple[str, ...]], constants: dict[str, np.ndarray]
) -> GraphNode:
    inputs = tuple(source.name for source in node.all_input_nodes)
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    module = path.removeprefix("model").removeprefix(".")
    op = str(node.target) if node.op == "call_function" else ""
    return GraphNode(node.name, op, inputs, module, _kind(node, parameters, constants))


def _kind(
    node: Node, parameters: dict[str, tuple[str, ...]], constants: dict[str, np.ndarray]
) -> NodeKind:
    if node.op == "output":
        return NodeKind.OUTPUT
    if node.op == "placeholder":
        if node.name in parameters:
            return NodeKind.PARAMETER
        if node.name in constants:
            return NodeKind.CONSTANT
        return NodeKind.TOKENS if node.name == "ids" else NodeKind.POSITIONS
    if is_attention(node) or linear_weight(node, parameters) or is_embedding(node, parameters):
        return NodeKind.KERNEL
    if not node.all_input_nodes:
        return NodeKind.CONSTANT
    return NodeKind.VIEW if is_view(node) else NodeKind.COMPUTE


def is_attention(node: Node) -> bool:
    """Whether the node is the attention op."""
    return node.target is torch.ops.bp.attention.default


def is_embedding(node: Node, parameters: dict[str, tuple[str, ...]]) -> bool:
    """Whether the node gathers rows of a parameter."""
    if node.target is not torch.ops.aten.embedding.default:
        return False
    table, ids = node.args[0], node.args[1]
    return isinstance(table, Node) and table.name in parameters and _numel(ids) == 1


def linear_weight(node: Node, parameters: dict[str, tuple[str, ...]]) -> Node | None:
    """The weight of a product of a whole row with a parameter, or None for any other node."""
    if node.target is torch.ops.aten.linear.default:
        row, weight = node.args[0], node.args[1]
        depth = 1
    elif node.target is torch.ops.aten.addmm.default and len(node.kwargs) == 0:
        row, weight = node.args[1], node.args[2]
        depth = 0
    elif node.target in (torch.ops.aten.mm.default, torch.ops.aten.matmul.default):
        row, weight = node.args[0], node.args[1]
        depth = 0
    else:
        return None
    if not isinstance(weight, Node) or weight.name not in parameters:
        return None
    shape = weight.meta["val"].shape
    whole = len(shape) == 2 and _numel(row) == shape[depth]
    return weight if whole else None


def linear_bias(node: Node) -> Node | None:
    """The bias of a linear kernel node."""
    if node.target is torch.ops.aten.linear.default:
        return node.args[2] if len(node.args) > 2 else None  # type: ignore[return-value]
    if node.target is torch.ops.aten.addmm.default:
        return node.args[0]  # type: ignore[return-value]
    return None


def linear_row(node: Node) -> Node:
    """The activation row that a linear kernel node reads."""
    return node.args[1 if node.target is torch.ops.aten.addmm.default else 0]  # type: ignore[return-value]


def is_transposed(node: Node) -> bool:
    """Whether a linear kernel node's weight is stored as [inputs, outputs]."""
    return node.target is not torch.ops.aten.linear.default


_LAYOUT_OPS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.dropout.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten._to_copy.default,
}
_PERMUTING_OPS = {
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
}


def is_view(node: Node) -> bool:
    """Whether the node's value has the same bytes in the same order as its input, for one token."""
    if not node.all_input_nodes or len(node.all_input_nodes) > 1:
        return False
    source, value = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if source.dtype != value.dtype or source.numel() != value.numel():
        return False
    if node.target in _LAYOUT_OPS:
        return True
    return node.target in _PERMUTING_OPS and _keeps_order(node, source, value)


def _keeps_order(node: Node, source: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a permutation moves only dimensions of size 1."""
    rank = source.dim()
    if node.target is torch.ops.aten.permute.default:
        order = [d % rank for d in node.args[1]]  # type: ignore[union-attr,operator]
    elif node.target is torch.ops.aten.t.default:
        order = list(reversed(range(rank)))
    else:
        order = list(range(rank))
        a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[call-overload]
        order[a], order[b] = order[b], order[a]
    moved = [d for d in order if source.shape[d] != 1]
    return moved == sorted(moved)


def _numel(value: Any) -> int:
    """Elements of a node's value."""
    return int(value.meta["val"].numel())
