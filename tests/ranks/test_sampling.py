"""Sampling: each filter's rule, the order of the chain, and that a seed fixes the outcome."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.sampling import (
    Candidates,
    SamplingOptions,
    draw,
    make_sampler,
    min_p,
    probabilities,
    top_k,
    top_p,
)

VOCAB = 12

some_logits = arrays(
    np.float32, VOCAB, elements=st.floats(-30, 30, width=32, allow_subnormal=False)
)
some_options = st.builds(
    SamplingOptions,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repeat_penalty=st.floats(0.5, 2),
    repeat_last_n=st.integers(-1, 5),
    seed=st.integers(0, 2**32),
)


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def candidates_of(*values: float) -> Candidates:
    return Candidates(np.arange(len(values)), np.array(values))


def test_temperature_zero_takes_the_best_token_and_the_lowest_id_among_equals() -> None:
    sample = make_sampler(SamplingOptions())
    assert sample(logits_of(0.5, 2.0, -1.0, 2.0), []) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_and_not_a_token(
    bad: float, temperature: float
) -> None:
    sample = make_sampler(SamplingOptions(temperature=temperature))
    with pytest.raises(FloatingPointError, match="token 1"):
        sample(logits_of(0.5, bad, 1.0), [])


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_of_recent_tokens() -> None:
    def best(logits: np.ndarray, history: list[int], last_n: int = 64) -> int:
        options = SamplingOptions(repeat_penalty=2.0, repeat_last_n=last_n)
        return make_sampler(options)(logits, history)

    assert best(logits_of(3.0, 2.0), [0]) == 1
    assert best(logits_of(-2.0, -3.0), [0]) == 1
    assert best(logits_of(3.0, 2.0), [0, 0, 0]) == 1, "a token counts once"
    assert best(logits_of(5.0, 2.0), [0, 0, 0]) == 0, "a token counts once"
    assert best(logits_of(3.0, 2.0), [0, 1], last_n=1) == 0, "token 0 is no longer recent"
    assert best(logits_of(3.0, 2.0), [0], last_n=0) == 0
    assert best(logits_of(3.0, 2.9, 1.0), [0, 2, 2, 2], last_n=-1) == 1


def test_top_k_keeps_the_best_and_the_lowest_ids_among_equals() -> None:
    kept = top_k(3)(candidates_of(1.0, 5.0, 1.0, 7.0, 1.0))
    assert kept.ids.tolist() == [3, 1, 0]


def test_top_p_keeps_the_fewest_tokens_that_reach_the_probability() -> None:
    half_quarter_quarter = candidates_of(np.log(0.25), np.log(0.5), np.log(0.25))
    assert top_p(0.4)(half_quarter_quarter).ids.tolist() == [1]
    assert top_p(0.6)(half_quarter_quarter).ids.tolist() == [1, 0]
    assert top_p(0.9)(half_quarter_quarter).ids.tolist() == [1, 0, 2]


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 1.0])
def test_top_p_of_a_vocabulary_is_that_of_its_sorted_tokens(spread: float, p: float) -> None:
    """Few tokens reach the probability where logits are spread, nearly all where they are not."""
    logits = spread * np.random.default_rng(3).standard_normal(9000)
    logits[5000:5300] = logits[17]  # equals keep their order
    order = np.argsort(-logits, kind="stable")
    cumulated = np.cumsum(np.exp(logits[order] - logits.max()))
    count = int(np.searchsorted(cumulated, p * cumulated[-1])) + 1
    kept = top_p(p)(Candidates(np.arange(9000), logits))
    assert abs(len(kept.ids) - count) <= (1 if p == 1.0 else 0)
    assert np.array_equal(kept.ids, order[: len(kept.ids)])


def test_min_p_drops_tokens_below_the_share_of_the_best() -> None:
    kept = min_p(0.3)(candidates_of(np.log(0.6), np.log(0.25), np.log(0.15)))
    assert kept.ids.tolist() == [0, 1]


def test_top_p_looks_at_the_probabilities_before_the_temperature() -> None:
    # At temperature 1 token 0 has 0.88 of the mass; after dividing by 100 it would have a half.
    sample = make_sampler(SamplingOptions(temperature=100, top_p=0.8, seed=1))
    assert {sample(logits_of(2.0, 0.0), []) for _ in range(50)} == {0}


def test_a_draw_falls_in_the_share_of_its_token() -> None:
    quarters = candidates_of(np.log(0.25), np.log(0.5), np.log(0.25))
    assert [draw(quarters, u) for u in (0.0, 0.24, 0.26, 0.74, 0.76, 0.9999999)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


@given(logits=some_logits, options=some_options, history=st.lists(st.integers(0, VOCAB - 1)))
def test_the_same_seed_gives_the_same_tokens_and_leaves_the_logits_alone(
    logits: np.ndarray, options: SamplingOptions, history: list[int]
) -> None:
    before = logits.copy()
    one, other = make_sampler(options), make_sampler(options)
    tokens = [one(logits, history) for _ in range(5)]
    assert tokens == [other(logits, history) for _ in range(5)]
    assert all(0 <= token < VOCAB for token in tokens)
    assert np.array_equal(logits, before)


@given(logits=some_logits, k=st.integers(1, VOCAB), p=st.floats(0.01, 1), share=st.floats(0.01, 1))
def test_filters_keep_the_best_token_and_never_prefer_a_worse_one(
    logits: np.ndarray, k: int, p: float, share: float
) -> None:
    everything = Candidates(np.arange(VOCAB), logits.astype(np.float64))
    for keep in (top_k(k), top_p(p), min_p(share)):
        kept = keep(everything)
        assert int(np.argmax(logits)) in kept.ids
        dropped = np.delete(logits, kept.ids)
        assert dropped.size == 0 or dropped.max() <= logits[kept.ids].min()
    assert len(top_k(k)(everything).ids) == k
    mass = probabilities(everything.logits)[top_p(p)(everything).ids].sum()
    assert mass >= p - 1e-12


def test_samples_follow_the_probabilities() -> None:
    sample = make_sampler(SamplingOptions(temperature=1, seed=7))
    logits = logits_of(np.log(0.1), np.log(0.6), np.log(0.3))
    counts = np.bincount([sample(logits, []) for _ in range(4000)], minlength=3)
    assert np.allclose(counts / 4000, [0.1, 0.6, 0.3], atol=0.04)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", 1e-9),
        ("repeat_penalty", float("inf")),
        ("max_tokens", 2.5),
        ("seed", 1.5),
        ("top_k", None),
        ("ignore_eos", 1),
        ("repeat_last_n", -2),
        ("seed", -1),
    ],
)
def test_a_value_out_of_range_names_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{field} is {value}: it must be"):
        SamplingOptions(**{field: value})


def test_numbers_of_numpy_are_numbers() -> None:
    options = SamplingOptions(max_tokens=np.int64(3), temperature=np.float64(0.5))  # type: ignore[arg-type]
    assert (options.max_tokens, options.temperature) == (3, 0.5)


def test_one_stop_text_needs_no_list() -> None:
    assert SamplingOptions(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^stop is \[1\]: it must be a text or a list of texts"):
        SamplingOptions(stop=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-30])
def test_the_smallest_temperatures_take_the_best_token(value: float) -> None:
    sample = make_sampler(SamplingOptions(temperature=value, seed=1))
    assert {sample(logits_of(1.0, 9.0, 9.5, 0.0), []) for _ in range(20)} == {2}


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_furthest_repeat_penalties_leave_logits_finite(penalty: float) -> None:
    sample = make_sampler(SamplingOptions(repeat_penalty=penalty))
    assert sample(logits_of(30.0, 0.0, -1e30), [0, 1, 2]) == 0


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"^stop is empty"):
        SamplingOptions(stop=("a", ""))
