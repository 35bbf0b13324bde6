"""The element counts of buddy-mlir's specs: checked against the model, and then followed."""

from types import SimpleNamespace
from typing import Any

import pytest

from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.launcher.element_counts import (
    check_float_total,
    chosen_counts,
    model_counts,
    rotary_elements,
)
from buddy_pipeline.launcher.spec import Spec, WeightsOverride
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import Checkpoint, TensorInfo, TokenizerSource

DEEPSEEK = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "tie_word_embeddings": False,
}


def deepseek(more: dict[str, tuple[int, ...]] | None = None, **config: Any) -> Checkpoint:
    """DeepSeek-R1-Distill-Qwen-1.5B's tensors by name and shape, and `more`."""
    hidden, inner, kv, vocabulary = 1536, 8960, 256, 151936
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(28):
        at = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (inner, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input", "post_attention"):
            shapes[f"{at}.{name}_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    shapes |= more or {}
    stored: Any = {
        name: SimpleNamespace(info=TensorInfo(name, shape, "BF16"))
        for name, shape in shapes.items()
    }
    return Checkpoint(SimpleNamespace(), DEEPSEEK | config, stored, TokenizerSource())  # type: ignore[arg-type]


def spec(variant: str, **counts: int) -> Spec:
    return Spec(name="s", variant=variant, weights_override=WeightsOverride(**counts))


def choose(variant: str, **counts: int) -> tuple[bool, str]:
    """Whether linears with a bias are quantised, and the warning."""
    chosen, warning = chosen_counts(spec(variant, **counts), VARIANTS[variant], deepseek())
    return chosen.biased, warning


BUDDY = {"linear_elements": 1_455_489_024, "other_elements": 322_338_752}


def test_buddy_mlir_s_counts_mean_linears_without_a_bias() -> None:
    assert choose("w8a32", total=1_777_827_776, **BUDDY) == (False, "")


def test_buddy_mlir_s_w8a16_total_is_a_warning() -> None:
    biased, warning = choose(
        "w8a16",
        total=1_777_855_776,
        **BUDDY,
        f16_elements=322_338_752,
        i8_elements=1_455_489_024,
    )
    assert not biased
    assert "total is 1,777,855,776, but its parts are 1,777,827,776" in warning


def test_scales_may_be_counted_by_themselves() -> None:
    counts = BUDDY | {"other_elements": 321_599_040, "linear_output_channels": 739_712}
    assert choose("w8a32", total=1_777_827_776, **counts) == (False, "")


def test_counts_of_all_linears_mean_all_linears() -> None:
    counts = model_counts(deepseek(), VARIANTS["w8a32"], biased=True)
    assert counts.linear == 1_455_489_024 + 28 * 1536 * (1536 + 2 * 256)
    assert choose("w8a32", total=counts.total, linear_elements=counts.linear) == (True, "")
    assert choose("w8a32", total=counts.total) == (True, "")


def test_a_total_alone_can_mean_linears_without_a_bias() -> None:
    assert choose("w8a32", total=1_777_827_776) == (False, "")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            BUDDY | {"linear_elements": 5},
            "linear_elements is 5, but the model has 1,543,569,408 or 1,455,489,024",
        ),
        (BUDDY | {"other_elements": 6}, "other_elements is 6, but the model has 322,338,752:"),
        (BUDDY | {"i8_elements": 7}, "i8_elements is 7, but the model has 1,455,489,024:"),
        (BUDDY | {"f16_elements": 8}, "f16_elements is 8, but the model has 322,338,752:"),
        (
            BUDDY | {"linear_output_channels": 9},
            "linear_output_channels is 9, but the model has 739,712:",
        ),
        ({}, "total is 1,777,827,777, but the model has"),
    ],
)
def test_a_count_that_is_not_the_model_s_is_named_with_the_model_s(
    counts: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        choose("w8a32", total=1_777_827_777, **counts)
    assert f"spec s: weights_override.{message}" in str(caught.value)


def test_a_tied_head_is_a_linear_and_its_embedding_is_counted_once() -> None:
    tied = deepseek(tie_word_embeddings=True)
    untied = model_counts(deepseek(), VARIANTS["w8a32"], biased=False)
    counts = model_counts(tied, VARIANTS["w8a32"], biased=False)
    assert counts.linear == untied.linear
    assert counts.other == untied.other - 151936 * 1536


@pytest.mark.parametrize("biased", [True, False])
def test_experts_are_linears_and_what_chooses_them_is_none(biased: bool) -> None:
    layer = "model.layers.0.mlp"
    experts: dict[str, tuple[int, ...]] = {
        f"{layer}.gate.weight": (7, 52),
        f"{layer}.shared_expert_gate.weight": (1, 52),
        f"{layer}.experts.gate_up_proj": (7, 54, 52),
        f"{layer}.experts.down_proj": (7, 27, 52),  # [inputs, outputs] each, as its bias shows
        f"{layer}.experts.down_proj_bias": (7, 52),
    }
    before = model_counts(deepseek(), VARIANTS["w8a32"], biased)
    counts = model_counts(deepseek(more=experts), VARIANTS["w8a32"], biased)
    assert counts.linear - before.linear == 52 + 7 * 54 * 52 + biased * 7 * 27 * 52
    assert counts.channels - before.channels == 1 + 7 * 54 + biased * 7 * 52
    assert counts.total - before.total == (
        7 * 52 + 52 + 7 * 54 * 52 + 7 * 27 * 52 + 7 * 52 + counts.channels - before.channels
    )


def test_the_total_of_floats_counts_parameters_and_rotary_frequencies() -> None:
    check_float_total(spec("f32", total=1_777_088_064), deepseek())


def test_a_wrong_total_of_floats_is_an_error_with_both_counts() -> None:
    with pytest.raises(UserError, match=r"is 1,777,088,000, but .* has 1,777,088,064"):
        check_float_total(spec("f32", total=1_777_088_000), deepseek())


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        (DEEPSEEK, 64),
        ({"model_type": "qwen3", "hidden_size": 1024, "head_dim": 128}, 64),
        (DEEPSEEK | {"partial_rotary_factor": 0.25}, 16),
        (DEEPSEEK | {"rope_parameters": {"partial_rotary_factor": 0.25}}, 16),
        (DEEPSEEK | {"model_type": "gpt2"}, 0),
        ({"model_type": "bloom", "hidden_size": 64, "n_head": 4}, 0),
        ({"model_type": "gptj", "n_embd": 64, "n_head": 4, "rotary_dim": 12}, 6),
        ({"model_type": "afresh", "n_embd": 64, "n_head": 4}, 8),
        ({"model_type": "afresh"}, 0),
    ],
)
def test_rotary_frequencies_are_half_of_the_rotated_elements_of_a_head(
    config: dict[str, Any], elements: int
) -> None:
    assert rotary_elements(config) == elements
