"""Model files from strangers: each malformed header is one line and exit code 2.

What the messages say in detail is tested in tests/ranks/checkpoint; here a user sees them.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.launcher.cli import main

U32, U64 = "<I", "<Q"
STRING, ARRAY, UINT32 = 8, 9, 4  # GGUFValueType


def refused(path: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a run on this model prints; it names the file."""
    spec = path.parent / "spec.json"
    spec.write_text("{}")
    arguments = ["--spec", spec, "--prompt", "Hello", "--local-model", path]
    capfd.readouterr()  # what made the model may have printed
    try:
        code = main([str(word) for word in arguments])
    except SystemExit as leaving:
        code = leaving.code
    printed = capfd.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith(f"buddy-pipeline: error: {path}")
    assert printed.err.count("\n") == 1
    return printed.err


def text(value: str) -> bytes:
    return struct.pack(U64, len(value)) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack(U32, kind) + value


def tensor(dims: list[int], kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    packed = b"".join(struct.pack(U64, size) for size in dims)
    count = len(dims) if count is None else count
    return text("t") + struct.pack(U32, count) + packed + struct.pack("<IQ", kind, offset)


def gguf(*parts: bytes, fields: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, fields)
    return header + b"".join(parts) + bytes(256)


ARCHITECTURE = field("general.architecture", STRING, text("llama"))
GGUF_FILES: dict[str, bytes] = {
    "nothing": b"",
    "only the magic": b"GGUF",
    "another format": b"PK\x03\x04" + bytes(100),
    "an unknown version": gguf(version=99),
    "big-endian": gguf(version=3 << 24),
    "too many fields": gguf(fields=1 << 60),
    "too many tensors": gguf(tensors=1 << 60),
    "a key past the end": gguf(struct.pack(U64, 60_000), fields=1),
    "a key of 2^60 bytes": gguf(struct.pack(U64, 1 << 60), fields=1),
    "a string past the end": gguf(field("a", STRING, struct.pack(U64, 1 << 62)), fields=1),
    "an unknown value type": gguf(field("a", 77, b""), fields=1),
    "an array past the end": gguf(field("a", ARRAY, struct.pack("<IQ", UINT32, 1 << 62)), fields=1),
    "an array of arrays": gguf(field("a", ARRAY, struct.pack("<IQ", ARRAY, 1)), fields=1),
    "an array of an unknown type": gguf(field("a", ARRAY, struct.pack("<IQ", 50, 1)), fields=1),
    "an alignment of 0": gguf(
        ARCHITECTURE, field("general.alignment", UINT32, struct.pack(U32, 0)), fields=2
    ),
    "an alignment of 3": gguf(
        ARCHITECTURE, field("general.alignment", UINT32, struct.pack(U32, 3)), fields=2
    ),
    "no dimensions": gguf(ARCHITECTURE, tensor([]), fields=1, tensors=1),
    "2^31 dimensions": gguf(ARCHITECTURE, tensor([1], count=1 << 31), fields=1, tensors=1),
    "a dimension of 0": gguf(ARCHITECTURE, tensor([32, 0]), fields=1, tensors=1),
    "dimensions that wrap": gguf(ARCHITECTURE, tensor([1 << 33, 1 << 33]), fields=1, tensors=1),
    "an unknown tensor type": gguf(ARCHITECTURE, tensor([32], kind=500), fields=1, tensors=1),
    "a row of half a block": gguf(ARCHITECTURE, tensor([33], kind=2), fields=1, tensors=1),
    "an offset past the end": gguf(ARCHITECTURE, tensor([32], offset=1 << 40), fields=1, tensors=1),
    "an offset that wraps": gguf(
        ARCHITECTURE, tensor([32], offset=(1 << 64) - 32), fields=1, tensors=1
    ),
    "an unaligned offset": gguf(ARCHITECTURE, tensor([32], offset=1), fields=1, tensors=1),
    "no architecture": gguf(),
    "an unknown architecture": gguf(
        field("general.architecture", STRING, text("perceptron")), fields=1
    ),
}


@pytest.mark.parametrize("what", GGUF_FILES)
def test_a_malformed_gguf_file_is_one_line(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF_FILES[what])
    refused(path, capfd)


def safetensors(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    packed = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(U64, len(packed) if length is None else length) + packed + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


SAFETENSORS_FILES: dict[str, bytes] = {
    "nothing": b"",
    "half a length": bytes(4),
    "a header past the end": safetensors(entry(), length=1 << 40),
    "a header of 2^63 bytes": safetensors(entry(), length=1 << 63),
    "no JSON": safetensors(b"{" * 50),
    "deep JSON": safetensors(b"[" * 100_000),
    "a list": safetensors([]),
    "a text for a tensor": safetensors({"a": "b"}),
    "an unknown type": safetensors(entry(dtype="F33")),
    "a negative dimension": safetensors(entry(shape=[-4])),
    "dimensions that wrap": safetensors(entry(shape=[1 << 40, 1 << 40])),
    "a shape that is no list": safetensors(entry(shape=4)),
    "offsets past the end": safetensors(entry(shape=[8], data_offsets=[0, 32])),
    "offsets backwards": safetensors(entry(data_offsets=[16, 0])),
    "offsets that disagree with the shape": safetensors(entry(shape=[3])),
    "bytes of no tensor": safetensors(entry(), data=bytes(20)),
}


@pytest.mark.parametrize("what", SAFETENSORS_FILES)
def test_a_malformed_safetensors_file_is_one_line(
    what: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    for source in checkpoint("llama").glob("*.json"):
        (path / source.name).write_bytes(source.read_bytes())
    (path / "model.safetensors").write_bytes(SAFETENSORS_FILES[what])
    assert "model.safetensors" in refused(path, capfd)
