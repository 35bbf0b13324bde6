"""The KV cache of one rank: memory for each slot, laid out as the attention kernels want it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from buddy_pipeline.compile.manifest import KV_BLOCK, KvLayer
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.memory_blocks import aligned_zeros
from buddy_pipeline.ranks.messages import ProtocolError


class KvCache:
    """Slots for the attention layers of one rank, each empty until a change gives it memory.

    A slot's memory is one array of `capacity` positions; layer i starts at `offsets[i]` elements a
    position, laid out as `KvLayer` says.

    context: positions that a slot may have at most, rounded up to whole blocks.
    """

    def __init__(self, layers: Sequence[KvLayer], slots: int, context: int) -> None:
        sizes = [layer.position_elements for layer in layers]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.position_bytes = sum(layer.position_elements * layer.element_bytes for layer in layers)
        """Memory of one position in all layers."""
        self._layers = layers
        self._largest = -(-context // KV_BLOCK) * KV_BLOCK
        self._memory = [aligned_zeros((0,), np.uint8)] * slots
        self.bases = np.zeros(slots, np.int64)
        """int64 [slots]: address of each slot's memory"""
        self.capacities = np.zeros(slots, np.int64)
        """int64 [slots]: positions that each slot's memory holds"""
        self._held = self.capacities.data

    def apply(self, changes: Iterable[Sequence[int]]) -> None:
        """Carry out slot changes (`SlotChange`, or rows of `Step.changes`) in order.

        Raises ProtocolError for one that cannot be and UserError if this host has no memory left.
        """
        for slot, capacity, source, positions in changes:
            self._check_change(slot, capacity, source, positions)
            size = capacity * self.position_bytes
            try:
                memory = aligned_zeros((size,), np.uint8)
            except MemoryError:
                raise UserError(
                    f"this host has no {size / 1e6:,.0f} MB for one more sequence of {capacity} "
                    "tokens: lower --kv-memory or --max-sequences"
                ) from None
            self._copy(self._memory[source], self.capacities[source], memory, capacity, positions)
            self._memory[slot] = memory
            self.bases[slot] = memory.ctypes.data
            self.capacities[slot] = capacity

    def check(self, positions: np.ndarray, slots: np.ndarray) -> None:
        """Raises ProtocolError if a token of a step lies outside the memory of its slot."""
        if not self._layers:
            return
        for token, (position, slot) in enumerate(
            zip(positions.tolist(), slots.tolist(), strict=True)
        ):
            if position >= self._held[slot]:
                raise ProtocolError(
                    f"position {position} of token {token}: slot {slot} has memory for "
                    f"{self._held[slot]}"
                )

    def _check_change(self, slot: int, capacity: int, source: int, positions: int) -> None:
        slots = len(self._memory)
        if not (0 <= slot < slots and 0 <= source < slots):
            raise ProtocolError(f"change of slot {slot} from slot {source}: there are {slots}")
        if not 0 <= capacity <= self._largest or capacity % KV_BLOCK:
            raise ProtocolError(
                f"capacity {capacity} of slot {slot}: expected whole blocks of {KV_BLOCK}, at most "
                f"{self._largest}"
            )
        held = int(self.capacities[source])
        if not 0 <= positions <= min(capacity, held):
            raise ProtocolError(
                f"{positions} positions copied from slot {source}, which holds {held}, to "
                f"{capacity} of slot {slot}"
            )

    def _copy(
        self, source: np.ndarray, held: int, target: np.ndarray, capacity: int, positions: int
    ) -> None:
        """Copy the first positions of every layer; the blocks' layout keeps, only the strides of
        heads and layers differ."""
        blocks = -(-positions // KV_BLOCK)
        if not blocks:
            return
        for layer, offset in zip(self._layers, self.offsets, strict=True):
            old_keys, old_values = _layer_views(source, layer, offset, held)
            new_keys, new_values = _layer_views(target, layer, offset, capacity)
            new_keys[:, :blocks] = old_keys[:, :blocks]
            new_values[:, :positions] = old_values[:, :positions]


def _layer_views(
    memory: np.ndarray, layer: KvLayer, offset: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys [head, block, elements] and values [head, position, elements] of a layer in a slot's
    memory, as unsigned integers of the elements' size, scales among them."""
    elements = memory.view(f"u{layer.element_bytes}")[offset * capacity :]
    keys = (layer.heads, capacity // KV_BLOCK, layer.key_elements * KV_BLOCK)
    values = (layer.heads, capacity, layer.value_elements)
    middle = math.prod(keys)
    end = middle + math.prod(values)
    return elements[:middle].reshape(keys), elements[middle:end].reshape(values)
