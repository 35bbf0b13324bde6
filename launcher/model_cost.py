"""What a model's layers, embedding and head cost, from its config and the names in its files.

Nothing is read but headers, so that this takes no time and no memory whatever the model's size.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.launcher.config_numbers import first_number, optional_size
from buddy_pipeline.launcher.model import Model
from buddy_pipeline.partition.cost import NOTHING, ModelCost, PartCost
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import TensorInfo

#: The number in a tensor's name that is its layer's, as in "model.layers.7.mlp.up_proj.weight".
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
#: Parts of the names of embedding matrices: of tokens, and of positions where those are learned.
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed\w*|wte|wpe)\.")
#: In the names of experts that tokens choose from; not of those that all tokens share.
_EXPERT = re.compile(r"(?:^|\.)experts\.")
#: Names that configurations give to how many experts there are, and how many a token chooses.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    *("top_k_experts", "experts_per_token"),
)
_ACTIVATION_BYTES = 4  # f32 between ranks
#: Outputs side by side in a panel, for the size of a format's unit; it scales with them.
_PANEL = 32


def model_cost(model: Model) -> ModelCost:
    """The costs of the parts of a model in its variant.

    Raises UserError if the checkpoint names no tensor of some layer.
    """
    checkpoint, formats = model.checkpoint, model.formats

    chosen = _chosen_share(checkpoint.config)

    def linear(info: TensorInfo) -> PartCost:
        has_bias = info.name.removesuffix("weight") + "bias" in checkpoint.tensors
        form = formats.linear([info.name], has_bias, is_table=False)
        cost = _linear(info, _matrix_bytes(form))
        if not _EXPERT.search(info.name):
            return cost
        size = cost.memory_bytes
        return PartCost(size, 0.0, chosen * cost.flops, 0.0, size, chosen * size)

    def table_bytes(info: TensorInfo) -> float:
        names = [info.name]
        is_head = checkpoint.ties_head
        form = formats.table(names)
        if is_head:
            form = formats.linear(names, has_bias=False, is_table=True)
        return prod(info.shape) * _matrix_bytes(form)

    layers = [NOTHING] * model.layers
    embedding, head, table = NOTHING, NOTHING, None
    for info in checkpoint.parameters():
        found = _LAYER.search(info.name)
        if found is not None and int(found[1]) < model.layers:
            layers[int(found[1])] += linear(info)
        elif found is None and _EMBEDDINGS.search(info.name):
            embedding += PartCost(table_bytes(info), 0.0, 0.0)
            table = info if table is None else max(table, info, key=lambda i: prod(i.shape))
        elif found is None:
            head += linear(info)
    missing = next((number for number, cost in enumerate(layers) if cost == NOTHING), None)
    if missing is not None:
        raise UserError(
            f"{checkpoint.path} has no tensor of layer {missing} of {model.layers}: "
            "give the whole checkpoint"
        )
    shared = 0.0
    if checkpoint.ties_head and table is not None:
        shared = table_bytes(table)
        head += PartCost(shared, shared, 2.0 * prod(table.shape))
    cache = PartCost(0.0, 0.0, 0.0, _cached_elements(checkpoint.config) * _BYTES[formats.cache])
    hidden = _number(checkpoint.config, "hidden_size", "n_embd")
    return ModelCost(
        [layer + cache for layer in layers], embedding, head, shared, hidden * _ACTIVATION_BYTES
    )


#: Bytes of a cached element; int8 with its share of a scale for 32 elements.
_BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "int8": 1.125}


def _matrix_bytes(name: str) -> float:
    """Bytes of a packed element; scales of whole outputs are too few to count."""
    form = weight_format(name)
    return form.unit_bytes(_PANEL) / (form.unit * _PANEL)


def _linear(info: TensorInfo, matrix_bytes: float) -> PartCost:
    """The cost of a tensor that every token is multiplied with; vectors stay in f32."""
    elements = prod(info.shape)
    if len(info.shape) < 2:
        return PartCost(4.0 * elements, 4.0 * elements, elements)
    size = elements * matrix_bytes
    return PartCost(size, size, 2.0 * elements)


def _chosen_share(config: dict[str, Any]) -> float:
    """The part of all experts that a token chooses; all where the configuration does not tell."""
    experts, chosen = first_number(config, _EXPERTS), first_number(config, _CHOSEN)
    return 1.0 if experts is None or chosen is None else min(1.0, chosen / experts)


def _cached_elements(config: dict[str, Any]) -> int:
    """Elements of keys and values that one position adds to one layer's cache."""
    heads = _number(config, "num_attention_heads", "n_head")
    size = optional_size(config, "head_dim")
    if size is None:
        size = _number(config, "hidden_size", "n_embd") // heads
    return 2 * (optional_size(config, "num_key_value_heads") or heads) * size


def _number(config: dict[str, Any], *names: str) -> int:
    value = first_number(config, names)
    if value is None:
        raise UserError(f"the model's config names no {names[0]}: add it to its config.json")
    return value
