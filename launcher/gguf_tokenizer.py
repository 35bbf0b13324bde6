"""Builds a byte-pair tokenizer from the `tokenizer.*` metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What a pre-tokenizer's name means
is llama.cpp's src/llama-vocab.cpp; its regular expressions are written here as the models' own
tokenizer.json files have them, which is what llama.cpp's are derived from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.partition.errors import UserError

# Values of tokenizer.ggml.token_type, as in the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into the pieces that byte pairs are merged in."""

    pattern: str | None
    """Pieces are its matches; None is GPT-2's own pattern."""
    digits_alone: bool = False
    """Every digit is a piece."""
    nfc: bool = False
    """Text is composed to Unicode NFC first."""
    whole_words: bool = False
    """A piece that is a token is taken as it is, whatever the merges say."""
    add_bos: bool = False
    """Whether text starts with the BOS token when the file does not say."""


_GPT2 = PreTokenizer(None)
_DIGITS_THEN_GPT2 = PreTokenizer(None, digits_alone=True)
_LLAMA3 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    add_bos=True,
)
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "jais": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(_QWEN2_PATTERN, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2_PATTERN),
}
"""By `tokenizer.ggml.pre`."""


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys describe.

    Raises UserError for a tokenizer or pre-tokenizer that is not supported, a missing key, and
    lists that do not fit together.
    """
    pre = pre_tokenizer(metadata)
    tokens: Sequence[str] = _key(metadata, "tokenizer.ggml.tokens")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise UserError("GGUF key tokenizer.ggml.tokens lists a token twice: the file is damaged")
    merges = [_merge(line) for line in _key(metadata, "tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises bare Exceptions for merges of unknown tokens
        raise UserError(
            f"GGUF key tokenizer.ggml.merges does not fit the tokens: {error}"
        ) from None
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizer_steps(pre))
    _add_literal_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    return tokenizer


def pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The entry of `PRE_TOKENIZERS` for this file; UserError if its kind is not supported."""
    model = _key(metadata, "tokenizer.ggml.model")
    if model != "gpt2":
        raise UserError(
            f"GGUF tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE):"
            " use the model's Hugging Face directory with its tokenizer.json"
        )
    name = metadata.get("tokenizer.ggml.pre", "missing")
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"GGUF pre-tokenizer {name!r} is not supported: {nearest(name, PRE_TOKENIZERS)};"
            " use the model's Hugging Face directory with its tokenizer.json"
        )
    return PRE_TOKENIZERS[name]


def _pre_tokenizer_steps(pre: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    own_pattern = pre.pattern is None
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_pattern))
    return steps


def _add_literal_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int] | None
) -> None:
    """Tokens found in text as they are written, before it is cut: control and user-defined ones."""
    if types is None:
        return
    if len(types) != len(tokens):
        raise UserError(
            f"GGUF key tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens:"
            " the file is damaged"
        )
    literal = [
        AddedToken(tokens[id], special=kind != _USER_DEFINED, normalized=False)
        for id, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(literal)


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise UserError(
            f"GGUF key tokenizer.ggml.merges has the entry {line!r}: it must be two tokens with a"
            " space between them"
        )
    return left, right


def _key(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise UserError(f"GGUF key {key} is missing: the file has no usable tokenizer")
    return metadata[key]
