"""The lines of a batch: what a line of the input asks for, and which lines of the output are done.

An input line is a JSON object with `id` (a text or whole number), `prompt` (a text) or `messages`,
optionally `raw`, `top_logits`, and any sampling option of the command line by its name with
underscores, such as `max_tokens`, `temperature`, `seed` or `ignore_eos`. An output line has `id`
and the fields that `--json` writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buddy_pipeline.launcher.chat import check_messages
from buddy_pipeline.launcher.generate import Request, check_prompt_length
from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.launcher.prompt import encode_messages, encode_text
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.kinds import check_kind
from buddy_pipeline.ranks.sampling import SamplingOptions

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer

Id = str | int

_SAMPLING = tuple(field.name for field in fields(SamplingOptions))
_KEYS = ("id", "prompt", "messages", "raw", "top_logits", *_SAMPLING)


@dataclass(frozen=True)
class Line:
    """A line of the input that can be run."""

    id: Id
    request: Request


def read_lines(
    texts: Iterable[str], tokenizer: Tokenizer, context: int, done: Mapping[Id, bytes | None]
) -> Iterator[Line | UserError]:
    """The lines of an input, one after the other as they are wanted, without those that are done
    (see `finished`).

    An error in place of a line says what is wrong with it, starting with its number; so does a line
    that was done with another prompt. Empty lines are passed over.
    """
    seen: dict[Id, int] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = _parse(text)
            id = _id(line)
            if id in seen:
                raise UserError(f"id {id!r} is that of line {seen[id]}: give each its own")
            seen[id] = number
            request = _request(line, tokenizer, context)
            if id not in done:
                yield Line(id, request)
            elif done[id] not in (None, _digest(request.prompt_ids)):
                raise UserError(
                    f"id {id!r} is done in the output, for another prompt: give this line another"
                    " id, or results a new file"
                )
        except UserError as error:
            yield UserError(f"line {number}: {error}")


def finished(path: Path) -> dict[Id, bytes | None]:
    """The ids of the results in an output file, if there is one, and a digest of the prompt of
    each, None where the file does not say it.

    A last line that was cut off when it was written is removed from the file. Raises UserError
    for a file that holds something else than results.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"--output {path} cannot be read: {error.strerror}") from None
    whole = content[: content.rfind(b"\n") + 1]
    found: dict[Id, bytes | None] = {}
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = _parse(text.decode())
            found[_id(line)] = _digest(line["prompt_ids"]) if "prompt_ids" in line else None
        except (UserError, UnicodeDecodeError):
            raise UserError(
                f"--output {path} has no result in line {number}: give the file of an earlier run"
                " of this batch, or a new one"
            ) from None
    if len(whole) < len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return found


def _digest(prompt_ids: object) -> bytes:
    """Of token ids, as a file or a request has them."""
    return hashlib.blake2b(json.dumps(prompt_ids).encode(), digest_size=16).digest()


def _parse(text: str) -> dict[str, Any]:
    try:
        text.encode()
        line = json.loads(text)
    except UnicodeEncodeError:  # bytes that are no text were read as lone surrogates
        raise UserError("not UTF-8: save the file as that") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}") from None
    if not isinstance(line, dict):
        raise UserError(f"a JSON {type(line).__name__}: give an object")
    return line


def _id(line: dict[str, Any]) -> Id:
    id = line.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise UserError(f"id is {id!r}: give a text or a whole number")
    try:
        str(id).encode()
    except UnicodeEncodeError:
        raise UserError(f"id is {id!r}, which is not Unicode text: give it as UTF-8") from None
    return id


def _request(line: dict[str, Any], tokenizer: Tokenizer, context: int) -> Request:
    for key in line:
        if key not in _KEYS:
            raise UserError(f"unknown key {key!r}: {nearest(key, _KEYS)}")
    raw, top_logits = line.get("raw", False), line.get("top_logits", 0)
    check_kind("raw", raw, bool)
    check_kind("top_logits", top_logits, int)
    if top_logits < 0:
        raise UserError(f"top_logits is {top_logits}: it must be 0 or more")
    if ("prompt" in line) == ("messages" in line):
        raise UserError("give either prompt or messages")
    if "messages" in line:
        if raw:
            raise UserError("raw and messages exclude each other: messages need the template")
        check_messages(line["messages"], "messages")
        ids = encode_messages(line["messages"], tokenizer)
    else:
        if not isinstance(line["prompt"], str):
            raise UserError(f"prompt is {line['prompt']!r}: give a text")
        ids = encode_text(line["prompt"], tokenizer, raw=raw)
    check_prompt_length(len(ids), context)
    sampling = SamplingOptions(**{key: line[key] for key in _SAMPLING if key in line})
    return Request(ids, sampling, top_logits)
