"""Paths on the command line: parsed, and checked before any time is spent on what they are for."""

import os
from pathlib import Path

import typer

from buddy_pipeline.partition.errors import UserError


def path(text: str) -> Path:
    """A path that names something; for `parser=` of an option.

    An empty text, as an unset shell variable gives, would otherwise mean the current folder.
    """
    if not text.strip():
        raise typer.BadParameter("it is empty: give a path")
    return Path(text)


def check_writable(option: str, path: Path) -> None:
    """Raises UserError if no file could be written at `path`, the value of `option`."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir():
        raise UserError(f"{option} {path} cannot be written: give a file in a folder that exists")
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"{option} {path} cannot be written: {folder} is read-only, give another folder"
        )
