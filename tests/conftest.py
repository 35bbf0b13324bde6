"""Settings and fixtures of the whole suite."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.checkpoints import tiny_checkpoint

# Deterministic by default, so that a change is judged by its own merits; scripts/nightly searches
# further. No deadlines: wall time says nothing about correctness on a shared machine.
settings.register_profile("default", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, **overrides)`: the folder of a tiny model, written once a session.

    The arguments are those of `tests.checkpoints.tiny_checkpoint`. Tests that change the files must
    work on a copy.
    """
    written: dict[str, Path] = {}

    def write(family: str, **overrides: object) -> Path:
        key = f"{family} {sorted(overrides.items())!r}"
        if key not in written:
            path = tmp_path_factory.mktemp(family)
            written[key] = tiny_checkpoint(path, family, **overrides)
        return written[key]

    return write
