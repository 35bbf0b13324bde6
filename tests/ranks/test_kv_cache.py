"""Changes of slots move what sequences have computed, and what cannot be is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.manifest import KV_BLOCK, KvLayer
from buddy_pipeline.ranks.kv_cache import KvCache
from buddy_pipeline.ranks.messages import ProtocolError

LAYERS = tuple(KvLayer(h, k, v, "f32") for h, k, v in ((3, 5, 7), (1, 8, 16)))
HALVES = tuple(KvLayer(h, k, v, "f16") for h, k, v in ((3, 5, 7), (1, 8, 16)))
SLOTS, CONTEXT = 3, 100
LARGEST = 128


def cache(layers: tuple[KvLayer, ...] = LAYERS) -> KvCache:
    return KvCache(layers, SLOTS, CONTEXT)


def element(kv: KvCache, slot: int, layer: int, head: int, position: int, e: int) -> np.ndarray:
    """One element, [1], found by the address arithmetic of the attention kernel: `e` counts the
    key's elements, then the value's."""
    shape = LAYERS[layer]
    capacity = int(kv.capacities[slot])
    at = kv.offsets[layer] * capacity
    if e < shape.key:
        block, lane = divmod(position, KV_BLOCK)
        at += head * capacity * shape.key + block * shape.key * KV_BLOCK + e * KV_BLOCK + lane
    else:
        at += shape.heads * capacity * shape.key + head * capacity * shape.value_stride
        at += position * shape.value_stride + e - shape.key
    dtype = np.float32 if kv.position_bytes == cache().position_bytes else np.float16
    return kv._memory[slot].view(dtype)[at : at + 1]


def places(positions: int) -> list[tuple[int, int, int, int]]:
    return [
        (layer, head, position, e)
        for layer, shape in enumerate(LAYERS)
        for head in range(shape.heads)
        for position in range(positions)
        for e in range(shape.key + shape.value)
    ]


def fill(kv: KvCache, slot: int, positions: int) -> dict[tuple[int, int, int, int], int]:
    """Writes a number of its own to every element; the numbers by place."""
    # Small whole numbers, which halves hold too; neighbours in any direction differ.
    written = {place: number % 2039 + 1 for number, place in enumerate(places(positions))}
    for place, number in written.items():
        element(kv, slot, *place)[:] = number
    return written


@pytest.mark.parametrize("layers", [LAYERS, HALVES])
@pytest.mark.parametrize("positions", [1, 32, 45, 64])
def test_a_slot_that_grows_keeps_its_positions(positions: int, layers: tuple[KvLayer, ...]) -> None:
    kv = cache(layers)
    kv.apply([(1, 64, 1, 0)])
    written = fill(kv, 1, positions)
    kv.apply([(1, LARGEST, 1, positions)])
    assert kv.capacities.tolist() == [0, LARGEST, 0]
    for place, number in written.items():
        assert element(kv, 1, *place) == number


@pytest.mark.parametrize("capacity", [64, 96, LARGEST])
def test_a_prefix_is_copied_and_its_source_is_left_alone(capacity: int) -> None:
    kv = cache()
    kv.apply([(0, 96, 0, 0)])
    written = fill(kv, 0, 90)
    kv.apply([(2, capacity, 0, 50)])
    for place in places(50):
        assert element(kv, 2, *place) == written[place]
    for place, number in written.items():
        assert element(kv, 0, *place) == number


def test_addresses_are_those_of_the_slots_memory() -> None:
    kv = cache()
    kv.apply([(0, 32, 0, 0), (1, 64, 1, 0), (0, 0, 0, 0)])
    assert kv.capacities.tolist() == [0, 64, 0]
    assert kv.bases[1] == kv._memory[1].ctypes.data
    assert kv.bases[1] % 64 == 0
    assert kv._memory[0].nbytes == 0
    assert kv._memory[1].nbytes == 64 * kv.position_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((3, 32, 0, 0), "change of slot 3 from slot 0: there are 3"),
        ((0, 32, -1, 0), "change of slot 0 from slot -1"),
        ((0, 33, 0, 0), "capacity 33 of slot 0: expected whole blocks of 32, at most 128"),
        ((0, 160, 0, 0), "capacity 160"),
        ((0, 1 << 40, 0, 0), "capacity 1099511627776"),
        ((0, -32, 0, 0), "capacity -32"),
        ((0, 128, 1, 65), "65 positions copied from slot 1, which holds 64, to 128 of slot 0"),
        ((0, 32, 1, 33), "33 positions copied from slot 1, which holds 64, to 32 of slot 0"),
        ((0, 32, 1, -1), "-1 positions"),
    ],
)
def test_a_change_that_cannot_be_is_refused(
    change: tuple[int, int, int, int], message: str
) -> None:
    kv = cache()
    kv.apply([(1, 64, 1, 0)])
    with pytest.raises(ProtocolError, match=message):
        kv.apply([change])


@given(position=st.integers(0, 200), slot=st.integers(0, 2))
def test_a_token_outside_its_slots_memory_is_refused(position: int, slot: int) -> None:
    kv = cache()
    kv.apply([(0, 128, 0, 0), (1, 32, 1, 0)])
    tokens = (np.array([5, position]), np.array([0, slot]))
    if position < kv.capacities[slot]:
        kv.check(*tokens)
    else:
        with pytest.raises(ProtocolError, match=f"position {position} of token 1: slot {slot}"):
            kv.check(*tokens)
