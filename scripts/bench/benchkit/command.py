"""What the scripts' command lines share: how they end, and options that several have."""

from __future__ import annotations

import importlib
import os
import subprocess
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


def user_environment() -> dict[str, str]:
    """The environment for commands that are timed as a user's: Python has compiled this program's
    modules once and kept them, as it does unless the environment forbids it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    words = [sys.executable, "-m", "compileall", "-q", *_package_folders()]
    subprocess.run(words, env=environment, check=True)
    return environment


def _package_folders() -> list[str]:
    names = ("partition", "compile", "ranks", "launcher")
    modules = (importlib.import_module(f"buddy_pipeline.{name}") for name in names)
    return [str(Path(module.__file__ or "").parent) for module in modules]


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
