"""Damaged files of either format end in a UserError or are read; nothing else, at bounded cost."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from tests.ranks.checkpoint.raw_gguf import tiny_llama

# A file of two kilobytes must not make the reader take more than this.
_MAX_BYTES = 1 << 22

_POSITION = st.floats(0, 1, exclude_max=True)
_VALUES = st.sampled_from([0, 1, 0x7F, 0x80, 0xFE, 0xFF]) | st.integers(0, 255)
# Runs of one value make the large lengths and counts that single bytes do not.
_DAMAGE = st.lists(st.tuples(_POSITION, st.integers(1, 8), _VALUES), min_size=1, max_size=4)
_LENGTHS = st.none() | _POSITION


def damaged(data: bytes, damage: list[tuple[float, int, int]], length: float | None) -> bytes:
    spoilt = bytearray(data)
    for position, count, value in damage:
        begin = int(position * len(spoilt))
        spoilt[begin : begin + count] = bytes([value]) * len(spoilt[begin : begin + count])
    return bytes(spoilt if length is None else spoilt[: int(length * len(spoilt))])


def open_and_read_all(path: Path) -> None:
    try:
        checkpoint = open_checkpoint(path)
        for name, info in checkpoint.tensors.items():
            if info.shape:
                checkpoint.read(name)
        checkpoint.element_count()
    except UserError as error:
        assert str(error).isprintable()


def in_bounded_memory(work: Callable[[], None]) -> None:
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < _MAX_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama().write(tmp_path_factory.mktemp("fuzz") / "m.gguf")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    (path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    tensors = {f"t{i}": np.ones((i, 3), np.float32) for i in range(1, 5)}
    save_file(tensors, path / "model.safetensors")
    return path


@given(damage=_DAMAGE, length=_LENGTHS)
def test_damaged_gguf_files(
    gguf: Path, damage: list[tuple[float, int, int]], length: float | None
) -> None:
    target = gguf.with_name("damaged.gguf")
    target.write_bytes(damaged(gguf.read_bytes(), damage, length))
    in_bounded_memory(lambda: open_and_read_all(target))


@given(damage=_DAMAGE, length=_LENGTHS)
def test_damaged_safetensors_files(
    directory: Path, damage: list[tuple[float, int, int]], length: float | None
) -> None:
    original = directory / "model.safetensors"
    whole = original.read_bytes()
    try:
        original.write_bytes(damaged(whole, damage, length))
        in_bounded_memory(lambda: open_and_read_all(directory))
    finally:
        original.write_bytes(whole)


@given(damage=_DAMAGE, length=_LENGTHS)
def test_damaged_configurations(
    directory: Path, damage: list[tuple[float, int, int]], length: float | None
) -> None:
    original = directory / "config.json"
    whole = original.read_bytes()
    try:
        original.write_bytes(damaged(whole, damage, length))
        in_bounded_memory(lambda: open_and_read_all(directory))
    finally:
        original.write_bytes(whole)
