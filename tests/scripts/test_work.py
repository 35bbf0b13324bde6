"""Work is counted as the definition of a share of the roofline says."""

import compare
import generate
import pytest

from benchkit.limits import Limits
from benchkit.work import Work, count_work
from buddy_pipeline.compile.manifest import KvLayer, Parameter, PartitionPlan, WeightPart

HIDDEN, INNER, VOCAB = 8, 12, 40
EMBEDDING = Parameter("panels", (WeightPart(("embed",), (), (VOCAB, HIDDEN), False),), 4)
HEAD = Parameter("panels", (WeightPart(("head",), (), (VOCAB, HIDDEN), False),), 4)
UP = Parameter("panels", (WeightPart(("up",), ("up.b",), (INNER, HIDDEN), False),), 4)
UP_BIAS = Parameter("panel_bias", UP.parts, 4)
NORM = Parameter("plain", (WeightPart(("norm",), (), (HIDDEN,), False),), 0)
CONFIG = {"num_attention_heads": 3}


def partition(unit: str, *parameters: Parameter, kv: tuple[KvLayer, ...] = ()) -> PartitionPlan:
    return PartitionPlan(unit, unit, "t", (), (), parameters, (), kv)


def work(head: Parameter = HEAD, **config: object) -> Work:
    layer = KvLayer(heads=1, key=5, value=7, dtype="f32")
    partitions = [
        partition("prelude", EMBEDDING),
        partition("0", NORM, UP, UP_BIAS, kv=(layer,)),
        partition("postlude", NORM, head),
    ]
    return count_work(partitions, 100, {**CONFIG, **config})


def test_decode_reads_each_weight_once_and_no_embedding() -> None:
    elements = INNER * HIDDEN + INNER + HIDDEN + VOCAB * HIDDEN
    assert work().decode_bytes(context=9) == 4 * elements + 10 * 100


def test_a_tied_head_is_read_although_it_is_the_embedding() -> None:
    assert work(head=EMBEDDING).weight_bytes == work().weight_bytes


def test_weights_of_half_the_size_are_half_the_bytes() -> None:
    half = Parameter("panels", HEAD.parts, 4, "bf16")
    saved = work().weight_bytes - work(head=half).weight_bytes
    assert saved == 2 * VOCAB * HIDDEN


def test_prefill_multiplies_layers_for_every_token_and_the_head_once() -> None:
    matrices = INNER * HIDDEN * 4 + VOCAB * HIDDEN
    pairs = 1 + 2 + 3 + 4
    assert work().prefill_flops(4) == 2 * (matrices + 3 * (5 + 7) * pairs)


def test_a_sliding_window_bounds_what_attention_reads() -> None:
    windowed = work(sliding_window=2, model_type="mistral")
    assert work().decode_bytes(9) - windowed.decode_bytes(9) == (10 - 2) * 100
    assert work().prefill_flops(4) - windowed.prefill_flops(4) == 2 * 36 * (10 - (1 + 2 + 2 + 2))


@pytest.mark.parametrize(
    "config",
    [
        {"sliding_window": 2, "use_sliding_window": False},
        {"sliding_window": 2, "model_type": "gemma2"},
        {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {"sliding_window": None},
    ],
)
def test_a_window_that_not_every_layer_has_does_not_count(config: dict[str, object]) -> None:
    assert work(**config).window is None


LIMITS = Limits(1, read_bytes_per_s=1000.0, f32_flops_per_s=500.0, bf16_flops_per_s=2000.0)


def test_shares_are_of_the_time_at_the_limit() -> None:
    one = work()
    decode = generate.Phase("decode", 9, 2)
    least = (one.decode_bytes(9) + one.decode_bytes(10)) / 1000
    assert decode.least_seconds(one, LIMITS, "f32") == pytest.approx(least)
    figures = generate.figures(decode, [4 * least, 2 * least, 2 * least], least)
    assert figures["share"] == pytest.approx(0.5)
    assert figures["tokens_per_s"]["median"] == pytest.approx(1 / least)
    prefill = generate.Phase("prefill", 4, 0)
    assert prefill.tokens == 4
    assert prefill.least_seconds(one, LIMITS, "f32") == pytest.approx(one.prefill_flops(4) / 500)


def test_the_peak_is_of_the_arithmetic_that_a_variant_can_use() -> None:
    without = Limits(1, 1000.0, 500.0, None)
    assert generate.peak(LIMITS, "bf16") == 2000.0
    assert generate.peak(without, "bf16") == 500.0
    assert generate.peak(LIMITS, "f16") == 500.0


def test_ratios_are_of_the_same_round() -> None:
    seconds = {
        "ours:f32": {"prefill": [1.0, 10.0, 1.0], "decode": [1.0, 1.0, 1.0]},
        "peer": {"prefill": [3.0, 30.0, 3.0], "decode": [0.5, 2.0, 4.0]},
    }
    (pair,) = compare.ratios(seconds, ["ours:f32"])
    assert (pair["prefill"]["min"], pair["prefill"]["max"]) == (3.0, 3.0)
    assert (pair["decode"]["median"], pair["decode"]["min"]) == (2.0, 0.5)
