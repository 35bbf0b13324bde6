"""The KV cache of one rank: memory for each slot, laid out as the attention kernels want it."""

from collections.abc import Sequence

import numpy as np

from buddy_pipeline.compile.manifest import KV_BLOCK, KvLayer
from buddy_pipeline.ranks.memory_blocks import aligned_zeros


class KvCache:
    """Slots of `context` positions for the attention layers of one rank.

    A slot's memory is one array; layer i starts at `offsets[i]` elements a position. Pages that
    no sequence has reached take no memory.
    """

    def __init__(self, layers: Sequence[KvLayer], slots: int, context: int) -> None:
        self.capacity = -(-context // KV_BLOCK) * KV_BLOCK
        sizes = [layer.position_elements for layer in layers]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.position_bytes = sum(layer.position_elements * layer.element_bytes for layer in layers)
        self._memory = [
            aligned_zeros((self.capacity * self.position_bytes,), np.uint8) for _ in range(slots)
        ]
        self.bases = np.array([m.ctypes.data for m in self._memory], np.int64)
        """int64 [slots]: address of each slot's memory"""
        self.capacities = np.full(slots, self.capacity, np.int64)
        """int64 [slots]: positions that each slot's memory holds"""
