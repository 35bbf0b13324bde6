"""The tokenizer metadata of a GGUF file, checked for types before anyone relies on them."""

from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import TokenizerSource
from buddy_pipeline.ranks.checkpoint.gguf_header import GgufHeader
from buddy_pipeline.ranks.checkpoint.shown import shown

_PREFIX = "tokenizer."
_TOKENS = "tokenizer.ggml.tokens"
_TEMPLATE = "tokenizer.chat_template"

# The type of an array's elements, or of the field itself.
_ARRAYS: dict[str, type] = {
    _TOKENS: str,
    "tokenizer.ggml.merges": str,
    "tokenizer.ggml.token_type": int,
    "tokenizer.ggml.scores": float,
}
_SINGLE: dict[str, type] = {
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    _TEMPLATE: str,
    "tokenizer.ggml.add_bos_token": bool,
    "tokenizer.ggml.add_eos_token": bool,
    "tokenizer.ggml.add_space_prefix": bool,
}
_ONE_PER_TOKEN = ("tokenizer.ggml.token_type", "tokenizer.ggml.scores")

# Tokens that end a reply: of the text, of the turn, of the message.
_END_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
_ID_SUFFIX = "_token_id"


def gguf_tokenizer_source(header: GgufHeader) -> TokenizerSource:
    """Return the fields `tokenizer.*` of a header as a tokenizer source.

    Raises:
        UserError: a field has the wrong type, arrays have different lengths, or a special token
            is not in the vocabulary.
    """
    fields = {key: value for key, value in header.fields.items() if key.startswith(_PREFIX)}
    _check_types(header, fields)
    end_ids = [fields[key] for key in _END_KEYS if key in fields]
    return TokenizerSource(
        gguf=fields,
        chat_template=fields.get(_TEMPLATE),
        eos_ids=tuple(dict.fromkeys(end_ids)),
        bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        add_bos=fields.get("tokenizer.ggml.add_bos_token"),
    )


def _check_types(header: GgufHeader, fields: dict[str, Any]) -> None:
    for key, kind in _ARRAYS.items():
        # An array's elements are all of one type, so the first stands for them.
        value = fields.get(key, [])
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            raise UserError(
                f"{header.path}: metadata {key} must be an array of {kind.__name__}; damaged file"
            )
    for key, kind in _SINGLE.items():
        if key in fields and type(fields[key]) is not kind:
            raise UserError(
                f"{header.path}: metadata {key} is {shown(fields[key])}; "
                f"it must be a {kind.__name__}"
            )
    tokens = len(fields.get(_TOKENS, []))
    for key in _ONE_PER_TOKEN:
        if key in fields and len(fields[key]) != tokens:
            raise UserError(
                f"{header.path}: metadata {key} has {len(fields[key])} elements for "
                f"{tokens} tokens; damaged file"
            )
    for key, value in fields.items():
        if key.endswith(_ID_SUFFIX) and (type(value) is not int or not 0 <= value < tokens):
            raise UserError(
                f"{header.path}: metadata {shown(key)} is {shown(value)}; "
                f"it must be the id of one of {tokens} tokens"
            )
