"""The bytes that one token stands for, and text from tokens as they come.

Every tokenizer here maps each token to bytes on its own, so text is the UTF-8 of their
concatenation: decoding a stream costs the same per token however long it is, and gives exactly
what decoding all of it at once gives.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.shown import shown

PieceBytes = Callable[[str], bytes]
"""A token as the vocabulary spells it -> the bytes it stands for."""


class Detokenizer:
    """Text from a stream of tokens; what it has returned so far never ends inside a character."""

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool) -> None:
        """`strip_space` drops one space at the start of the text."""
        self._token_bytes = token_bytes
        self._strip_space = strip_space
        # Bytes that can never become a character turn into U+FFFD; an unfinished one is held back.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that this token completes, perhaps none."""
        return self._emit(self._decoder.decode(self._token_bytes(token)))

    def finish(self) -> str:
        """What an unfinished character at the end becomes: U+FFFD, or nothing if there is none."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text and self._strip_space:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


def piece_bytes(decoder: Mapping[str, Any] | None) -> tuple[PieceBytes, bool]:
    """How a `tokenizer.json` with this `decoder` spells bytes, and whether it strips a first space.

    Knows the byte-level alphabet of GPT-2 and the SentencePiece spelling (spaces as U+2581, bytes
    as <0x00>). Raises UserError naming any other decoder.
    """
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    for kind in kinds:
        if kind not in _KNOWN_STEPS:
            raise UserError(
                f"tokenizer decoder {kind!r} is not supported: use a model whose tokenizer.json has"
                f" one of {', '.join(sorted(_KNOWN_STEPS))}"
            )
    if not steps:
        # Without a decoder the tokenizers library joins words with spaces.
        return (lambda piece: f" {piece}".encode()), True
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    replacements = [_replacement(step) for step in steps if step["type"] == "Replace"]
    metaspaces = [step for step in steps if step["type"] == "Metaspace"]
    replacements += [(step["replacement"], " ") for step in metaspaces]
    byte_fallback = "ByteFallback" in kinds
    strips = any(step["type"] == "Strip" and step["content"] == " " for step in steps) or any(
        step["prepend_scheme"] != "never" for step in metaspaces
    )

    def sentencepiece_bytes(piece: str) -> bytes:
        if byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return sentencepiece_bytes, strips


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    pattern = step["pattern"]
    if "String" not in pattern:
        raise UserError(
            f"tokenizer decoder 'Replace' of {shown(pattern)} is not supported: use a model whose"
            " tokenizer.json replaces texts, not regular expressions"
        )
    return pattern["String"], step["content"]


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a token spelled in GPT-2's byte-level alphabet.

    A token with a character outside the alphabet was added as plain text and stands for itself.
    """
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, inverted: `bytes_to_unicode` of openai/gpt-2's encoder.py.

    Printable bytes are themselves; the others take the code points from 256 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_KNOWN_STEPS = frozenset({"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
