"""JSON that users write: parsed, or refused in one line that says where it is wrong."""

import json
from pathlib import Path
from typing import Any

from buddy_pipeline.partition.errors import UserError


def read_json(where: str, path: Path) -> Any:
    """What the JSON file at `path` holds; UserError, prefixed with `where`, if that is not JSON."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror}): give a JSON file") from None
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8 text: save it as JSON") from None
    return parse_json(where, text)


def parse_json(where: str, text: str) -> Any:
    """What the text holds; UserError, prefixed with `where`, for a mistake or a key given twice."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"{where} gives the key {twice!r} twice: keep one")
        return entries

    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{where} is not valid JSON: {error}") from None
    except RecursionError:
        raise UserError(
            f"{where} is nested too deeply: nothing in it needs more than a few levels"
        ) from None
