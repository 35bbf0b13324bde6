"""The KV cache: room for every slot and layer, nothing shared, little touched."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.manifest import KV_BLOCK, KvLayer
from buddy_pipeline.ranks.kv_cache import KvCache
from buddy_pipeline.ranks.memory import peak_memory

layers = st.lists(
    st.builds(KvLayer, st.integers(1, 8), st.integers(1, 256), st.integers(1, 256), st.just("f32")),
    min_size=1,
    max_size=6,
)


@given(layers, st.integers(1, 4), st.integers(1, 200))
def test_layers_lie_side_by_side_in_every_slot(of: list[KvLayer], slots: int, context: int) -> None:
    cache = KvCache(of, slots, context)
    assert cache.capacity % KV_BLOCK == 0 and context <= cache.capacity < context + KV_BLOCK
    ends = [o + layer.position_elements for o, layer in zip(cache.offsets, of, strict=True)]
    assert [0, *ends][: len(of)] == cache.offsets
    assert cache.position_bytes == 4 * sum(layer.position_elements for layer in of)
    assert (cache.capacities == cache.capacity).all() and len(cache.bases) == slots
    size = cache.capacity * cache.position_bytes
    starts = np.sort(cache.bases)
    assert (np.diff(starts) >= size).all() and (cache.bases % 64 == 0).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_the_bytes_in_16_bits(dtype: str) -> None:
    wide = KvCache([KvLayer(2, 64, 64, "f32")] * 3, 1, 100)
    half = KvCache([KvLayer(2, 64, 64, dtype)] * 3, 1, 100)
    assert 2 * half.position_bytes == wide.position_bytes
    assert half.offsets == wide.offsets  # in elements


def test_a_long_context_takes_memory_only_when_it_is_reached() -> None:
    before = peak_memory()
    cache = KvCache([KvLayer(8, 128, 128, "f32")] * 8, 4, 16384)
    assert cache.position_bytes * cache.capacity * 4 == 4 << 30
    assert peak_memory() - before < 64 << 20
