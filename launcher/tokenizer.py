"""Text to token ids and back, from a `tokenizer.json` or from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from buddy_pipeline.launcher.gguf_tokenizer import build_gguf_tokenizer, pre_tokenizer
from buddy_pipeline.launcher.token_bytes import (
    Detokenizer,
    PieceBytes,
    byte_level_bytes,
    piece_bytes,
)
from buddy_pipeline.partition.errors import UserError

if TYPE_CHECKING:
    from buddy_pipeline.ranks.checkpoint import TokenizerSource


class Tokenizer:
    """One model's tokenizer, its chat template and its special tokens."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        source: TokenizerSource,
        *,
        piece: PieceBytes,
        strip_space: bool,
        add_bos: bool | None,
    ) -> None:
        """`add_bos` None leaves it to the tokenizer's own post-processor; see `open_tokenizer`."""
        added = tokenizer.get_added_tokens_decoder()
        self.chat_template = source.chat_template
        self.eos_ids = frozenset(source.eos_ids)
        self.bos_id = source.bos_id
        self.special_tokens = _special_tokens(tokenizer, source)
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self._piece = piece
        self._strip_space = strip_space
        self._literal = {id: token.content.encode() for id, token in added.items()}
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids.

        `add_special` puts BOS first if the model wants it. Text of a chat template has its special
        tokens already: encode that without.
        """
        by_post_processor = add_special and self._add_bos is None
        ids = self._tokenizer.encode(text, add_special_tokens=by_post_processor).ids
        if add_special and self._add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of these tokens; `keep_special` writes out control tokens too."""
        stream = self.detokenizer(keep_special=keep_special)
        return "".join([stream.push(id) for id in ids]) + stream.finish()

    def detokenizer(self, *, keep_special: bool = False) -> Detokenizer:
        """A new stream whose pieces join to what `decode` gives."""
        if keep_special:
            return Detokenizer(self._token_bytes, self._strip_space)
        special = self._special_ids
        return Detokenizer(
            lambda id: b"" if id in special else self._token_bytes(id), self._strip_space
        )

    def _token_bytes(self, id: int) -> bytes:
        """Bytes of a token; none for the padding rows that an embedding has past its vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            piece = self._tokenizer.id_to_token(id)
            known = self._literal.get(id) or (b"" if piece is None else self._piece(piece))
            self._bytes[id] = known
        return known


def open_tokenizer(source: TokenizerSource) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Whether text starts with BOS follows the source's `add_bos` if it has one. Otherwise a
    tokenizer.json's post-processor decides, as in Hugging Face transformers, and for GGUF the
    kind of pre-tokenizer, as in llama.cpp. Raises UserError for a checkpoint without a tokenizer
    and for one that is damaged or of a kind that is not supported.
    """
    if source.json_path is not None:
        tokenizer, piece, strip_space = _from_json(source.json_path)
        add_bos = source.add_bos
    elif source.gguf is not None:
        tokenizer = build_gguf_tokenizer(source.gguf)
        piece, strip_space = byte_level_bytes, False
        default = pre_tokenizer(source.gguf).add_bos
        add_bos = default if source.add_bos is None else source.add_bos
    else:
        raise UserError(
            "the model has no tokenizer.json: put the one of its Hugging Face repository beside it"
        )
    if add_bos and source.bos_id is None:
        raise UserError(
            "the tokenizer asks for a BOS token at the start of text but names none:"
            " set bos_token in tokenizer_config.json or tokenizer.ggml.bos_token_id in the GGUF"
        )
    return Tokenizer(tokenizer, source, piece=piece, strip_space=strip_space, add_bos=add_bos)


def _from_json(path: Path) -> tuple[tokenizers.Tokenizer, PieceBytes, bool]:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions for whatever is wrong
        raise UserError(f"{path} cannot be read as a tokenizer: {error}") from None
    # Padding and truncation are for training batches; a prompt is one text and never cut.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # The decoder's pickle is its JSON; parsing the whole file for it would take longer than all
    # the rest.
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    piece, strip_space = piece_bytes(decoder)
    return tokenizer, piece, strip_space


def _special_tokens(tokenizer: tokenizers.Tokenizer, source: TokenizerSource) -> dict[str, str]:
    """Texts of the special tokens by the names that chat templates use, such as `bos_token`."""
    texts: dict[str, str] = {}
    for name, value in source.config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[name] = text
    ids = {"bos_token": source.bos_id, "eos_token": next(iter(source.eos_ids), None)}
    for name, id in ids.items():
        if name not in texts and id is not None:
            text = tokenizer.id_to_token(id)
            if text is not None:
                texts[name] = text
    return texts
