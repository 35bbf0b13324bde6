"""The attention kernel against NumPy in float64; a token sees its own sequence alone."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.target import Target
from tests.compile.harness import Attending, assert_same_bits, host, rounded, runnable_targets

on_each_target = pytest.mark.parametrize("target", runnable_targets())


@dataclass
class Sequence:
    """Random queries [length, heads, key], keys and values [length, kv heads, …] of a sequence."""

    shape: AttentionShape
    kv_heads: int
    length: int
    seed: int = 0
    q: np.ndarray = field(init=False)
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng([self.length, self.kv_heads, self.seed])
        heads, key, value = self.kv_heads * self.shape.group, self.shape.key, self.shape.value

        def draw(*size: int) -> np.ndarray:
            return random.standard_normal((self.length, *size), np.float32)

        self.q, self.k, self.v = (
            draw(heads, key),
            draw(self.kv_heads, key),
            draw(self.kv_heads, value),
        )

    def attended(
        self,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
        slopes: np.ndarray | None = None,
    ) -> np.ndarray:
        """What causal attention gives in float64: [length, heads, value]."""
        cached = (rounded(part, self.shape.cache) for part in (self.k, self.v))
        k, v = (part.astype(np.float64).repeat(self.shape.group, axis=1) for part in cached)
        scores = np.einsum("thd,shd->hts", self.q.astype(np.float64), k) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        t, s = np.arange(self.length)[:, None], np.arange(self.length)
        if slopes is not None:
            scores = scores + slopes.astype(np.float64)[:, None, None] * (s - t)
        seen = (s <= t) & (s > t - window if window else True)
        scores = np.where(seen, scores, -np.inf)
        highest = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            highest = np.maximum(highest, sinks[:, None, None])
        weights = np.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[:, None, None] - highest)
        weights /= total
        return np.einsum("hts,shd->thd", weights, v)

    def part(self, which: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q[which], self.k[which], self.v[which]  # type: ignore[index]


def close(got: np.ndarray, expected: np.ndarray) -> None:
    """Inputs are of size 1: scores of depth 256 and sums over 200 positions leave this error."""
    assert np.abs(got - expected).max() < 2e-5


SHAPES = [
    AttentionShape(64, 64, 3, False, "f32"),
    AttentionShape(20, 20, 1, False, "f16"),
    AttentionShape(13, 13, 5, False, "bf16"),
    AttentionShape(22, 22, 3, True, "f32"),
    AttentionShape(1, 1, 1, False, "f32"),
    AttentionShape(7, 33, 2, False, "f16"),
    AttentionShape(128, 128, 7, False, "f32"),
    AttentionShape(36, 36, 32, False, "bf16"),
    AttentionShape(255, 256, 16, False, "f32"),
    AttentionShape(256, 256, 2, True, "bf16"),
    AttentionShape(64, 64, 3, False, "int8"),
    AttentionShape(7, 33, 2, True, "int8"),
    AttentionShape(80, 128, 1, False, "int8"),
]
ODD_SHAPES = [*SHAPES[:4], *SHAPES[-3:]]


@on_each_target
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name.removeprefix("bp_attention_"))
def test_prefill_and_decode(target: Target, shape: AttentionShape) -> None:
    scale, softcap = shape.key**-0.5, 3.0 if shape.softcap else 0.0
    sequence = Sequence(shape, 2, 101)
    expected = sequence.attended(scale, softcap=softcap)
    bench = Attending(target, shape, kv_heads=2, scale=scale, softcap=softcap)
    got = bench.step(*sequence.part(slice(0, 95)), range(95), team=2)
    close(got, expected[:95])
    for t in range(95, 101):
        got = bench.step(*sequence.part(slice(t, t + 1)), [t])
        close(got, expected[t : t + 1])


@on_each_target
@pytest.mark.parametrize("window", [1, 2, 13, 31, 32, 33, 64, 100, 1000])
def test_sliding_window(target: Target, window: int) -> None:
    shape = AttentionShape(13, 13, 5, False, "f32")
    sequence = Sequence(shape, 1, 100)
    bench = Attending(target, shape, window=window)
    got = bench.step(*sequence.part(slice(None)), range(100))
    close(got, sequence.attended(0.25, window))
    if window == 1:
        assert_same_bits(got, np.repeat(sequence.v, 5, axis=1))


@on_each_target
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("height", [0.0, 80.0])
def test_sinks_take_their_share(target: Target, group: int, height: float) -> None:
    """Also those whose score is far above all others."""
    shape = AttentionShape(20, 13, group, False, "f32", sinks=True)
    sequence = Sequence(shape, 2, 300)
    sinks = np.random.default_rng(0).standard_normal(2 * group).astype(np.float32)
    sinks[0] += np.float32(height)
    expected = sequence.attended(0.25, sinks=sinks)
    bench = Attending(target, shape, kv_heads=2, context=300, sinks=sinks)
    close(bench.step(*sequence.part(slice(0, 299)), range(299)), expected[:299])
    close(bench.step(*sequence.part(slice(299, 300)), [299], team=2), expected[299:])


@on_each_target
@pytest.mark.parametrize("group", [1, 3])
def test_slopes_lower_scores_by_distance(target: Target, group: int) -> None:
    shape = AttentionShape(20, 20, group, False, "f32", slopes=True)
    sequence = Sequence(shape, 2, 300)
    slopes = (2.0 ** -np.arange(1, 2 * group + 1)).astype(np.float32)
    expected = sequence.attended(0.25, slopes=slopes)
    bench = Attending(target, shape, kv_heads=2, context=300, slopes=slopes)
    got = bench.step(*sequence.part(slice(0, 299)), range(299))
    close(got, expected[:299])
    got = bench.step(*sequence.part(slice(299, 300)), [299], team=2)
    close(got, expected[299:])


@on_each_target
def test_a_window_reads_nothing_before_it(target: Target) -> None:
    shape = AttentionShape(20, 20, 1, False, "f32")
    sequence = Sequence(shape, 1, 90)
    sequence.k[:30] = np.nan
    sequence.v[:30] = np.inf
    bench = Attending(target, shape, window=40)
    got = bench.step(*sequence.part(slice(None)), range(90))
    assert np.isnan(got[:30]).all()
    sequence.k[:30], sequence.v[:30] = 0, 0
    close(got[69:], sequence.attended(0.25, 40)[69:])


@on_each_target
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=lambda s: s.name.removeprefix("bp_attention_"))
@pytest.mark.parametrize("window", [0, 40])
def test_chunks_and_teams_change_no_bit(target: Target, shape: AttentionShape, window: int) -> None:
    sequence = Sequence(shape, 2, 70)
    softcap = 3.0 if shape.softcap else 0.0

    def run(cuts: list[int], team: int) -> np.ndarray:
        bench = Attending(target, shape, kv_heads=2, window=window, softcap=softcap)
        parts = [
            bench.step(*sequence.part(slice(low, high)), range(low, high), team=team)
            for low, high in zip([0, *cuts], [*cuts, 70], strict=True)
        ]
        return np.concatenate(parts)

    whole = run([], 1)
    for cuts in ([32], [31, 33], [1, 2, 3, 64], list(range(1, 70))):
        assert_same_bits(run(cuts, 1), whole)
    assert_same_bits(run([], 2), whole)
    assert_same_bits(run([33], 3), whole)


@on_each_target
@pytest.mark.parametrize("window", [0, 100, 300])
@pytest.mark.parametrize("cache", ["f32", "bf16", "int8"])
def test_a_long_cache_split_among_threads_changes_no_bit(
    target: Target, cache: str, window: int
) -> None:
    """Positions on both sides of where spans begin."""
    shape = AttentionShape(13, 13, 5, False, cache)
    sequence = Sequence(shape, 2, 600)
    whole = Attending(target, shape, kv_heads=2, window=window, context=600)
    prefilled = whole.step(*sequence.part(slice(None)), range(600))
    close(prefilled, sequence.attended(0.25, window))
    for t in (254, 255, 256, 257, 300, 511, 512, 513, 599):
        for team in (1, 2, 3):
            got = whole.step(*sequence.part(slice(t, t + 1)), [t], team=team)
            assert_same_bits(got, prefilled[t : t + 1])
    pair = [250, 590]
    assert_same_bits(whole.step(*sequence.part(pair), pair, team=2), prefilled[pair])


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(1, 4), st.sampled_from([0, 5, 40, 270]), st.integers(0, 2**32))
def test_many_sequences_in_any_order_of_slots_chunks_and_tokens(
    slots: int, window: int, seed: int
) -> None:
    """Each sequence comes out with the bits that it has alone."""
    random = np.random.default_rng(seed)
    shape = AttentionShape(13, 13, 5, False, "f32")
    sequences = [Sequence(shape, 2, int(random.integers(1, 330)), slot) for slot in range(slots)]
    common = Attending(host(), shape, kv_heads=2, slots=slots, window=window, context=330)
    got = [np.zeros((s.length, 10, 13), np.float32) for s in sequences]
    done = [0] * slots
    while any(d < s.length for d, s in zip(done, sequences, strict=True)):
        chosen = []
        for slot, sequence in enumerate(sequences):
            most = min(100, sequence.length - done[slot])
            count = int(random.integers(0, most + 1))
            chosen += [(slot, done[slot] + i) for i in range(count)]
            done[slot] += count
        if not chosen:
            continue
        if random.random() < 0.5:
            random.shuffle(chosen)
        parts = [
            np.stack([getattr(sequences[slot], name)[t] for slot, t in chosen]) for name in "qkv"
        ]
        places, owners = [t for _, t in chosen], [slot for slot, _ in chosen]
        rows = common.step(*parts, places, owners, team=int(random.integers(1, 4)))
        for row, (slot, t) in zip(rows, chosen, strict=True):
            got[slot][t] = row
    for slot, sequence in enumerate(sequences):
        alone = Attending(host(), shape, kv_heads=2, window=window, context=330)
        whole = alone.step(*sequence.part(slice(None)), range(sequence.length))
        assert_same_bits(got[slot], whole)
        close(whole, sequence.attended(0.25, window))


@on_each_target
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_what_is_not_finite_stays_in_its_sequence(target: Target, bad: float, place: str) -> None:
    shape = AttentionShape(13, 13, 5, False, "f32")
    sequences = [Sequence(shape, 1, 50, seed) for seed in range(3)]
    owners = np.repeat([0, 1, 2], 50)
    places = list(range(50)) * 3

    def run() -> np.ndarray:
        bench = Attending(target, shape, slots=3)
        parts = [np.concatenate([getattr(s, n) for s in sequences]) for n in "qkv"]
        return bench.step(*parts, places, owners).reshape(3, 50, 5, 13)

    clean = run()
    getattr(sequences[1], place)[35, 0, 4] = bad
    got = run()
    assert_same_bits(got[0], clean[0])
    assert_same_bits(got[2], clean[2])
    assert_same_bits(got[1, :35], clean[1, :35])  # nor does the past see it
    if place == "v":
        assert not np.isfinite(got[1, 35:, :, 4]).any()
    else:
        with np.errstate(invalid="ignore"):
            expected = sequences[1].attended(0.25)
        assert (np.isnan(got[1]) == np.isnan(expected)).all()
    if place == "q":
        assert_same_bits(got[1, 36:], clean[1, 36:])
        assert_same_bits(got[1, 35, 1:], clean[1, 35, 1:])
    if place == "v":
        others = np.arange(13) != 4
        assert_same_bits(got[1][..., others], clean[1][..., others])


@on_each_target
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["k", "v"])
def test_in_int8_what_is_not_finite_takes_its_block_along(
    target: Target, bad: float, place: str
) -> None:
    shape = AttentionShape(40, 40, 1, False, "int8")
    sequences = [Sequence(shape, 1, 40, seed) for seed in range(2)]
    owners, places = np.repeat([0, 1], 40), list(range(40)) * 2

    def run() -> np.ndarray:
        bench = Attending(target, shape, slots=2)
        parts = [np.concatenate([getattr(s, n) for s in sequences]) for n in "qkv"]
        return bench.step(*parts, places, owners).reshape(2, 40, 40)

    clean = run()
    getattr(sequences[1], place)[35, 0, 4] = bad
    got = run()
    assert_same_bits(got[0], clean[0])
    assert_same_bits(got[1, :35], clean[1, :35])
    assert np.isnan(got[1, 35:, :32]).all()
    if place == "v":
        assert_same_bits(got[1, 35:, 32:], clean[1, 35:, 32:])


@on_each_target
def test_zeros_and_tiny_numbers_in_int8(target: Target) -> None:
    shape = AttentionShape(33, 33, 1, False, "int8")
    sequence = Sequence(shape, 1, 20)
    sequence.k[:], sequence.v[:10], sequence.v[10:] = 0.0, 0.0, 1e-44
    got = Attending(target, shape).step(*sequence.part(slice(None)), range(20))
    assert (got[:10] == 0).all() and (np.abs(got) <= 1e-44).all()


@on_each_target
def test_a_score_of_minus_infinity_weighs_nothing_beside_finite_ones(target: Target) -> None:
    """Even where it fills a whole block or a whole span of the cache, before finite ones."""
    shape = AttentionShape(4, 4, 1, False, "f32")
    sequence = Sequence(shape, 1, 400)
    sequence.q[:, 0, 0] = 1.0
    sequence.k[:, 0, 0] = 0.0
    sequence.k[:300, 0, 0] = -np.inf
    with np.errstate(invalid="ignore"):
        expected = sequence.attended(0.25)
    bench = Attending(target, shape, context=400)
    got = bench.step(*sequence.part(slice(None)), range(400))
    close(got[300:], expected[300:])
    for team in (1, 2):
        last = bench.step(*sequence.part(slice(399, 400)), [399], team=team)
        assert_same_bits(last, got[399:])
    sequence.k[0, 0, 0] = 0.0
    bench = Attending(target, shape, context=400)
    close(bench.step(*sequence.part(slice(None)), range(400)), sequence.attended(0.25))


@on_each_target
def test_scores_of_any_size_neither_overflow_nor_vanish(target: Target) -> None:
    shape = AttentionShape(8, 8, 1, False, "f32")
    for size in (1e-30, 1e4, 1e18):
        sequence = Sequence(shape, 1, 60)
        sequence.q *= size
        got = Attending(target, shape).step(*sequence.part(slice(None)), range(60))
        assert np.isfinite(got).all()
        if size == 1e-30:
            close(got, sequence.attended(0.25))


@on_each_target
def test_a_slot_used_again_remembers_nothing(target: Target) -> None:
    shape = AttentionShape(13, 13, 5, False, "f32")
    first, second = Sequence(shape, 1, 90), Sequence(shape, 1, 40, seed=1)
    bench = Attending(target, shape)
    bench.step(*first.part(slice(None)), range(90))
    again = bench.step(*second.part(slice(None)), range(40))
    fresh = Attending(target, shape).step(*second.part(slice(None)), range(40))
    assert_same_bits(again, fresh)


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=lambda s: s.name.removeprefix("bp_attention_"))
def test_a_slot_that_moves_to_another_capacity_changes_no_bit(shape: AttentionShape) -> None:
    sequence = Sequence(shape, 2, 90)
    whole = Attending(host(), shape, kv_heads=2, context=96)
    expected = whole.step(*sequence.part(slice(None)), range(90))
    moving = Attending(host(), shape, kv_heads=2, slots=2, context=160)
    moving.cache.apply([(0, 96, 0, 0)])
    moving.step(*sequence.part(slice(0, 70)), range(70))
    moving.cache.apply([(0, 160, 0, 70), (1, 96, 0, 70)])
    for slot in (0, 1):
        rest = sequence.part(slice(70, 90))
        assert_same_bits(moving.step(*rest, range(70, 90), [slot] * 20), expected[70:])


@on_each_target
def test_other_layers_of_the_cache_stay_as_they_are(target: Target) -> None:
    shape = AttentionShape(20, 20, 1, False, "f32")
    bench = Attending(target, shape, context=64)
    sequence = Sequence(shape, 1, 64)
    bench.step(*sequence.part(slice(None)), range(64))
    (memory,) = bench.memory
    layer = bench.cache.offsets[1] * bench.capacity
    assert np.isnan(memory[:layer]).all() and not np.isnan(memory[layer:]).any()
