"""What the scripts' command lines share: how they end, and options that several have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.affinity import available_cores

_USER_ERROR = 2


def main(command: Any) -> None:
    """Runs a script's command; a user's mistake is one line and exit code 2."""
    try:
        typer.run(command)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(_USER_ERROR)


def check_json_path(path: Path | None) -> None:
    """Raises UserError, before anything is measured, if the JSON cannot be written there."""
    if path is not None:
        check_writable("--json", path)


def team_sizes(text: str | None) -> tuple[int, ...]:
    """The team sizes of --threads; UserError for more than there are cores."""
    cores = len(available_cores())
    if text is None:
        return tuple(dict.fromkeys((1, cores)))
    sizes = whole_numbers("--threads", text)
    if max(sizes) > cores:
        raise UserError(f"--threads {text} asks for more than the {cores} cores of this process")
    return sizes


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """The positive numbers of a list such as "1,2"; UserError naming the option otherwise."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} {text!r} must be positive whole numbers, such as 1,2")
    return numbers
