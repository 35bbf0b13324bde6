"""The work of a step, counted from the plan: bytes that must be read, operations to be done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from buddy_pipeline.compile.manifest import Parameter, PartitionPlan
from buddy_pipeline.ranks.packing import packed_bytes

#: Layouts of parameters that are no matrices.
_VECTORS = ("plain", "panel_bias")


@dataclass(frozen=True)
class Work:
    """One model's work, independent of how it is computed."""

    weight_bytes: int
    """Packed weights that every token multiplies with or adds, each once: a tied head counts, rows
    that an embedding gathers do not."""
    kv_bytes: int
    """Keys and values of one position."""
    layer_weights: int
    """Elements of the layers' matrices."""
    head_weights: int
    """Elements of the head's matrix."""
    attention: int
    """Multiply-adds that attention makes with one position of the cache: for each layer and head,
    head size for the scores and value size for the sum."""
    window: int | None
    """Positions that every layer looks back at most; None if any looks at all."""

    def decode_bytes(self, context: int) -> int:
        """Bytes to read for one token whose sequence has `context` positions before it."""
        return self.weight_bytes + self.kv_bytes * self._seen(context + 1)

    def prefill_flops(self, tokens: int) -> int:
        """Operations for a prompt of `tokens`, with logits after the last one."""
        matrices = self.layer_weights * tokens + self.head_weights
        positions = sum(self._seen(position + 1) for position in range(tokens))
        return 2 * (matrices + self.attention * positions)

    def _seen(self, positions: int) -> int:
        return positions if self.window is None else min(positions, self.window)


def count_work(
    partitions: Iterable[PartitionPlan], kv_bytes: int, config: Mapping[str, Any]
) -> Work:
    """The work of a whole model with these partitions.

    kv_bytes: of one position in all layers.
    config: the Hugging Face config, for the number of query heads and the window.
    """
    used: dict[Parameter, None] = {}
    layer_weights = head_weights = attention = 0
    heads = config.get("num_attention_heads") or config["n_head"]
    for partition in partitions:
        if partition.unit == "prelude":
            continue  # gathers rows
        used |= dict.fromkeys(partition.parameters)
        matrices = [
            prod(part.shape)
            for parameter in partition.parameters
            if parameter.layout not in _VECTORS
            for part in parameter.parts
        ]
        if partition.unit == "postlude":
            head_weights += sum(matrices)
        else:
            layer_weights += sum(matrices)
        attention += sum(heads * (layer.key + layer.value) for layer in partition.kv)
    return Work(
        weight_bytes=sum(packed_bytes(parameter) for parameter in used),
        kv_bytes=kv_bytes,
        layer_weights=layer_weights,
        head_weights=head_weights,
        attention=attention,
        window=_window(config),
    )


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of all layers; models that mix kinds are counted as if without."""
    kinds = set(config.get("layer_types") or ())
    if config.get("use_sliding_window") is False or (kinds and kinds != {"sliding_attention"}):
        return None
    if config.get("model_type") in _ALTERNATING:
        return None
    window = config.get("sliding_window")
    return window if isinstance(window, int) else None


_ALTERNATING = frozenset({"gemma2", "gemma3_text"})
"""Model types where a window that the config names holds for some layers only."""
