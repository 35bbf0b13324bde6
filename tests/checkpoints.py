"""Tiny random checkpoints in the Hugging Face format, and what transformers computes from them.

Sizes are odd on purpose: no dimension is a multiple of a vector or of a kernel's tile, and head
counts, head sizes and hidden sizes differ from one another.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BOS_ID = 256  # behind the 256 byte tokens
EOS_ID = 257
VOCAB_SIZE = 261  # three rows more than the tokenizer has tokens, as padded vocabularies do

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    # Biases on query, key and value; one key head for five query heads; tied head.
    "qwen2": {
        "hidden_size": 60,
        "intermediate_size": 100,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    # Grouped queries; Llama 3's rotary scaling, with wavelengths in each of its three bands.
    "llama": {
        "hidden_size": 84,
        "intermediate_size": 131,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    # Norms on query and key; a head size that is not hidden size / heads.
    "qwen3": {
        "hidden_size": 52,
        "intermediate_size": 90,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "tie_word_embeddings": False,
    },
    # A sliding window that a 40-token prompt leaves behind.
    "mistral": {
        "hidden_size": 54,
        "intermediate_size": 94,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 18,
        "sliding_window": 13,
        "tie_word_embeddings": False,
    },
    # Soft caps, norms of `1 + weight` before and after, a window on every other layer.
    "gemma2": {
        "hidden_size": 45,
        "intermediate_size": 86,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 22,
        "query_pre_attn_scalar": 24,
        "sliding_window": 11,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    },
    # LayerNorm, learned positions, one projection for query, key and value, Conv1D weights.
    "gpt2": {
        "n_embd": 42,
        "n_head": 3,
        "n_inner": 101,
        "tie_word_embeddings": True,
    },
}

FAMILIES = tuple(_FAMILIES)

_MIXTURES: dict[str, dict[str, Any]] = {
    # Three of seven experts; the weights of those chosen add up to one.
    "qwen3_moe": {
        "hidden_size": 52,
        "intermediate_size": 90,
        "moe_intermediate_size": 27,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "tie_word_embeddings": False,
    },
    # Its files call the matrices w1, w2 and w3 of block_sparse_moe.
    "mixtral": {
        "hidden_size": 48,
        "intermediate_size": 43,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    # Norms over whole queries and keys; weights that are left as the softmax has them.
    "olmoe": {
        "hidden_size": 60,
        "intermediate_size": 33,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
}

MIXTURES = tuple(_MIXTURES)
"""Families whose feed-forward is a mixture of experts."""


class Reference(NamedTuple):
    """What transformers computes in float32."""

    prompt: np.ndarray  # float32 [prompt, vocab], logits after each token of the prompt
    tokens: np.ndarray  # int64 [new_tokens], greedy continuation
    steps: np.ndarray  # float32 [new_tokens, vocab], logits after each of `tokens`


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model, with every field that transformers would write."""
    from transformers import AutoConfig

    fields = {**_COMMON, **{**_FAMILIES, **_MIXTURES}.get(family, {}), **overrides}
    settings = AutoConfig.for_model(family, **fields)
    return settings.to_dict()


def tiny_checkpoint(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    as_published: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random model of `family` and a byte-level tokenizer into `path`.

    `overrides` are fields of the family's transformers config, which FAMILIES need none of.
    `max_shard_size`, such as "40KB", shards the safetensors file. Tensors have the names of
    published checkpoints, or else those that transformers' classes have. The same arguments give
    the same bytes. Returns `path`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {**_FAMILIES, **_MIXTURES}.get(family, {})
    config = AutoConfig.for_model(family, **{**_COMMON, **own, **overrides})
    model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.dim() == 1:
                # Norm weights and biases: around their neutral value, which differs by family.
                parameter.add_(0.3 * noise)
            else:
                # Large enough for logits that differ, and attention that is not uniform.
                parameter.copy_(0.2 * noise)
    model.to(getattr(torch, dtype))
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(path, save_original_format=as_published, **shards)
    _write_tokenizer(path)
    return path


def reference_logits(path: Path, ids: np.ndarray, new_tokens: int) -> Reference:
    """Run the checkpoint in `path` over `ids` [prompt] and `new_tokens` greedy steps.

    Float32, eager attention and experts whatever the checkpoint's dtype, and no KV cache, so that
    neither rounding nor a cache or kernel of transformers' own is part of the reference.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    sequence = torch.as_tensor(np.asarray(ids, dtype=np.int64))[None]
    with torch.no_grad():
        logits = prompt = model(sequence, use_cache=False).logits[0]
        tokens, steps = [], []
        for _ in range(new_tokens):
            token = logits[-1].argmax()
            sequence = torch.cat([sequence, token.view(1, 1)], dim=1)
            logits = model(sequence, use_cache=False).logits[0]
            tokens.append(int(token))
            steps.append(logits[-1].numpy())
    return Reference(
        prompt.numpy(),
        np.array(tokens, dtype=np.int64),
        np.array(steps, dtype=np.float32).reshape(new_tokens, prompt.shape[1]),
    )


def _write_tokenizer(path: Path) -> None:
    """One token a byte, so that any text has ids and any ids have a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
