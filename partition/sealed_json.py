"""JSON that shows whether it is what was written: a format version and a checksum in front.

Files that one stage leaves for another are sealed, so that a file of another version, or one that
was changed by hand or by a fault, is noticed before anything in it is used.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def seal(version: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content, of the format's `version`, as data of which `unseal` takes the JSON text."""
    return {"format": version, "checksum": _checksum(content), **content}


def unseal(version: int, text: str | bytes) -> dict[str, Any]:
    """The content of what `seal` made, as JSON reads it back; ValueError, saying why, for other
    text. How it was laid out does not count."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is cut short or no JSON") from None
    if not isinstance(data, dict) or data.get("format") != version:
        raise ValueError("is of another format version")
    content = {key: value for key, value in data.items() if key not in ("format", "checksum")}
    if data.get("checksum") != _checksum(content):
        raise ValueError("was changed after it was written")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
