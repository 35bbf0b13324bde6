"""A tokenizer of one token a byte, for models whose own is not there: any text has ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

#: The GGUF reader of llama.cpp wants at least one merge: a space and a "t", as GPT-2's first.
_MERGE = ("Ġ", "t")
_BOS, _EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer_files(folder: Path, config: dict[str, Any]) -> None:
    """Writes tokenizer.json and tokenizer_config.json with the config's special tokens."""
    vocabulary = {token: id for id, token in enumerate(_tokens())} | _special(config)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[_MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_special(config)))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def gguf_tokens(config: dict[str, Any]) -> tuple[list[str], list[bool], list[str]]:
    """Tokens by id for the whole vocabulary, which of them are special, and the merges.

    Ids without a token get a name that no text spells.
    """
    tokens = _tokens()
    tokens += [f"<|unused {id}|>" for id in range(len(tokens), config["vocab_size"])]
    special = [False] * len(tokens)
    for token, id in _special(config).items():
        tokens[id], special[id] = token, True
    return tokens, special, [" ".join(_MERGE)]


def _tokens() -> list[str]:
    """A character for each byte, as byte-level tokenizers write it, and the merged pair."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(_MERGE)]


def _special(config: dict[str, Any]) -> dict[str, int]:
    """The tokens that begin and end a sequence; one token where the model has one for both."""
    return {_BOS: config["bos_token_id"]} | {_EOS: config["eos_token_id"]}
