"""What a well-formed GGUF file may not say, and what it means when it may."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from tests.ranks.checkpoint import raw_gguf as raw
from tests.ranks.checkpoint.raw_gguf import Field, Gguf, Tensor, tiny_llama, with_fields

EMBEDDING = "token_embd.weight"


def renamed(old: str, new: str) -> Gguf:
    return raw.with_tensor(tiny_llama(), old, name=new)


REFUSED: dict[str, tuple[Gguf, str]] = {
    "architecture": (
        with_fields(tiny_llama(), raw.text("general.architecture", "mamba")),
        "architecture mamba; supported are gemma2, gemma3, gpt2, granite, llama",
    ),
    "no architecture": (
        raw.without_field(tiny_llama(), "general.architecture"),
        "architecture None; supported are",
    ),
    "split file": (
        with_fields(tiny_llama(), Field("split.count", 2, b"\3\0")),
        "one of 3 parts",
    ),
    "tensor type": (
        replace(tiny_llama(), tensors=(Tensor(EMBEDDING, (256, 1), type=raw.TYPE_Q2_K),)),
        f"tensor {EMBEDDING} has type Q2_K; supported are BF16, F16, F32, Q4_0",
    ),
    "unknown tensor": (
        renamed("blk.0.attn_norm.weight", "blk.0.attn_sinks.weight"),
        "tensor blk.0.attn_sinks.weight is not one of a llama model with 1 layer",
    ),
    "layer beyond the last": (
        renamed("blk.0.attn_norm.weight", "blk.1.attn_norm.weight"),
        "tensor blk.1.attn_norm.weight is not one of",
    ),
    "no embedding": (renamed(EMBEDDING, "output.weight"), f"no tensor {EMBEDDING}"),
    "extra dimension": (
        raw.with_tensor(tiny_llama(), "blk.0.attn_norm.weight", dims=(1, 2, 2)),
        "blk.0.attn_norm.weight has 3 dimensions",
    ),
    "rows that are no heads": (
        raw.with_tensor(tiny_llama(), "blk.0.attn_q.weight", dims=(4, 3)),
        "blk.0.attn_q.weight has 3 rows",
    ),
    "missing field": (
        raw.without_field(tiny_llama(), "llama.embedding_length"),
        "no metadata llama.embedding_length",
    ),
    "zero field": (
        with_fields(tiny_llama(), raw.number("llama.attention.head_count", 0)),
        "llama.attention.head_count is 0; it must be an integer from 1",
    ),
    "field of another type": (
        with_fields(tiny_llama(), raw.text("llama.context_length", "long")),
        "llama.context_length is long; it must be an integer",
    ),
    "epsilon not finite": (
        with_fields(tiny_llama(), raw.real("llama.attention.layer_norm_rms_epsilon", float("nan"))),
        "llama.attention.layer_norm_rms_epsilon is nan",
    ),
    "epsilon of another kind of norm": (
        with_fields(
            raw.without_field(tiny_llama(), "llama.attention.layer_norm_rms_epsilon"),
            raw.real("llama.attention.layer_norm_epsilon", 1e-5),
        ),
        "no metadata llama.attention.layer_norm_rms_epsilon",
    ),
    "layers that differ": (
        with_fields(
            tiny_llama(),
            Field(
                "llama.attention.head_count_kv",
                raw.ARRAY,
                raw.array(raw.U32, 2, raw.u32(1) + raw.u32(2)),
            ),
        ),
        "llama.attention.head_count_kv is [1, 2]; it must be one value for all layers",
    ),
    "more layers than tensors": (
        with_fields(tiny_llama(), raw.number("llama.block_count", 1 << 30)),
        "llama.block_count is 1073741824",
    ),
    "experts without how many are used": (
        with_fields(tiny_llama(), raw.number("llama.expert_count", 8)),
        "llama.expert_used_count",
    ),
    "more experts used than there are": (
        with_fields(
            tiny_llama(),
            raw.number("llama.expert_count", 8),
            raw.number("llama.expert_used_count", 9),
        ),
        "llama.expert_used_count is 9",
    ),
    "shared experts": (
        with_fields(tiny_llama(), raw.number("llama.expert_shared_count", 1)),
        "llama.expert_shared_count is 1",
    ),
    "partial rotary": (
        with_fields(tiny_llama(), raw.number("llama.rope.dimension_count", 1)),
        "llama.rope.dimension_count is 1",
    ),
    "rotary scaling": (
        with_fields(tiny_llama(), raw.text("llama.rope.scaling.type", "su")),
        "llama.rope.scaling.type is su",
    ),
    "rotary factors that are no Llama 3 scaling": (
        replace(
            tiny_llama(),
            tensors=(*tiny_llama().tensors, Tensor("rope_freqs.weight", (1,), offset=1024)),
            data=tiny_llama().data.ljust(1024, b"\0") + np.float32([3.0]).tobytes(),
        ),
        "rope_freqs.weight",
    ),
    "tokens of another type": (
        with_fields(
            tiny_llama(),
            Field("tokenizer.ggml.tokens", raw.ARRAY, raw.array(raw.U8, 3, b"abc")),
        ),
        "tokenizer.ggml.tokens must be an array of str",
    ),
    "token types fewer than tokens": (
        with_fields(
            tiny_llama(),
            Field("tokenizer.ggml.token_type", raw.ARRAY, raw.array(5, 1, raw.u32(1))),
        ),
        "tokenizer.ggml.token_type has 1 elements for 3 tokens",
    ),
    "special token out of range": (
        with_fields(tiny_llama(), raw.number("tokenizer.ggml.eos_token_id", 3)),
        "tokenizer.ggml.eos_token_id is 3",
    ),
    "template of another type": (
        with_fields(tiny_llama(), raw.number("tokenizer.chat_template", 1)),
        "tokenizer.chat_template is 1; it must be a str",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, case: str) -> None:
    file, culprit = REFUSED[case]
    path = file.write(tmp_path / "m.gguf")
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert culprit in message
    assert str(path) in message
    assert message.isprintable()


def test_the_smallest_model_opens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama().write(tmp_path / "m.gguf"))
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["vocab_size"] == 3
    assert checkpoint.config["rms_norm_eps"] == 1e-5  # not the float32 nearest to it
    assert checkpoint.element_count() == 12 + 4 + 2 * 4 + 2 * 16 + 2 * 8 + 3 * 32
    assert checkpoint.tokenizer.eos_ids == (2,)
    assert checkpoint.tokenizer.add_bos is None
    assert checkpoint.tokenizer.gguf is not None
    assert checkpoint.tokenizer.gguf["tokenizer.ggml.tokens"] == ["a", "b", "c"]


def test_query_rows_come_in_pairs_of_a_head(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama().write(tmp_path / "m.gguf"))
    key = checkpoint.read("model.layers.0.self_attn.k_proj.weight")
    np.testing.assert_array_equal(key, np.arange(8, dtype=np.float32).reshape(2, 4) / 2)


def test_llama_with_a_window_is_mistral(tmp_path: Path) -> None:
    file = with_fields(tiny_llama(), raw.number("llama.attention.sliding_window", 8))
    config = open_checkpoint(file.write(tmp_path / "m.gguf")).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 8)
    assert config["architectures"] == ["MistralForCausalLM"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ((), {"rope_type": "default", "rope_theta": 10000.0}),
        (
            (
                raw.text("llama.rope.scaling.type", "linear"),
                raw.real("llama.rope.scaling.factor", 4),
            ),
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            (
                raw.text("llama.rope.scaling.type", "yarn"),
                raw.real("llama.rope.scaling.factor", 2),
                raw.number("llama.rope.scaling.original_context_length", 8),
                raw.real("llama.rope.scaling.yarn_beta_fast", 16),
            ),
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rotary_scaling_is_carried_over(
    tmp_path: Path, fields: tuple[Field, ...], expected: dict[str, object]
) -> None:
    file = with_fields(tiny_llama(), *fields)
    assert open_checkpoint(file.write(tmp_path / "m.gguf")).config["rope_parameters"] == expected


def test_end_tokens_are_those_of_text_turn_and_message(tmp_path: Path) -> None:
    file = with_fields(
        tiny_llama(),
        raw.number("tokenizer.ggml.eot_token_id", 1),
        raw.number("tokenizer.ggml.eom_token_id", 2),
    )
    assert open_checkpoint(file.write(tmp_path / "m.gguf")).tokenizer.eos_ids == (2, 1)
