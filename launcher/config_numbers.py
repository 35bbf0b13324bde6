"""Whole numbers in a Hugging Face configuration, which anyone may have edited."""

from collections.abc import Sequence
from typing import Any

from buddy_pipeline.launcher.json_keys import is_count
from buddy_pipeline.partition.errors import UserError


def first_number(config: dict[str, Any], names: Sequence[str]) -> int | None:
    """The first of these entries that is a positive whole number, in the configuration or in that
    of its language model, which those of several media have apart."""
    for part in _parts(config):
        for name in names:
            value = part.get(name)
            if is_count(value, 1):
                return value
    return None


def optional_size(config: dict[str, Any], name: str) -> int | None:
    """An entry that a configuration, or that of its language model, may leave out or have as null;
    UserError if it is there and no whole number of 1 or more."""
    for part in _parts(config):
        value = part.get(name)
        if value is not None:
            if not is_count(value, 1):
                raise UserError(
                    f"the model's config has {name} {value!r}: it must be a whole number of 1 or"
                    " more, as in the config.json that the model was saved with"
                )
            return value
    return None


def _parts(config: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    text = config.get("text_config")
    return (config, text) if isinstance(text, dict) else (config,)
