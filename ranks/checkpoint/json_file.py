"""Reading the JSON files of a model directory."""

import json
from pathlib import Path
from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.shown import shown


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        UserError: the file cannot be read, is not UTF-8 JSON, or is not an object.
    """
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({shown(str(error))}); mend the file") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {shown(value)}, not a JSON object; mend the file")
    return value


def read_text(path: Path) -> str:
    """Return the text in `path`.

    Raises:
        UserError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); mend the file") from None
