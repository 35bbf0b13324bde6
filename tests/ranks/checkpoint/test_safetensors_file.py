"""A malformed safetensors file is one line naming it and the tensor, before anything is mapped."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.safetensors_file import open_safetensors

DATA = bytes(range(32))


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed(header: Any, data: bytes = DATA, claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "shorter than a length": (b"\0\0", "too short"),
    "header longer than the file": (packed({}, claimed=1000), "header of 1000 bytes"),
    "header length wraps": (packed({}, claimed=(1 << 64) - 1), f"of {(1 << 64) - 1} bytes"),
    "not JSON": (packed(b"{'a': 1}"), "is not JSON"),
    "not UTF-8": (packed(b'{"\xff": 1}'), "is not JSON"),
    "nested without end": (packed(b"[" * 100_000), "is not JSON"),
    "number without end": (packed(b'{"a": ' + b"9" * 5000 + b"}"), "is not JSON"),
    "not an object": (packed([1]), "not a JSON object"),
    "duplicate name": (
        packed(b'{"t": 1, "t": 2}'),
        "names t twice",
    ),
    "entry not an object": (packed({"t": 1}), "tensor t lacks"),
    "no offsets": (packed({"t": {"dtype": "F32", "shape": [8]}}), "tensor t lacks"),
    "unknown dtype": (packed({"t": entry(0, 32, dtype="F31")}), "tensor t has unknown type F31"),
    "dtype no string": (packed({"t": entry(0, 32, dtype=[1])}), "tensor t has unknown type [1]"),
    "negative dimension": (packed({"t": entry(0, 32, [-8])}), "tensor t has shape [-8]"),
    "fractional dimension": (packed({"t": entry(0, 32, [8.0])}), "tensor t has shape [8.0]"),
    "boolean dimension": (packed({"t": entry(0, 4, [True])}), "tensor t has shape [True]"),
    "dimension over 63 bits": (packed({"t": entry(0, 32, [1 << 63])}), "tensor t has shape"),
    "many dimensions": (packed({"t": entry(0, 32, [1] * 9)}), "tensor t has shape"),
    "product wraps": (
        packed({"t": entry(0, 16, [4194305, 4194305, 211106198978564])}),
        "but data_offsets give it 16",
    ),
    "one offset": (
        packed({"t": {"dtype": "F32", "shape": [8], "data_offsets": [0]}}),
        "tensor t has data_offsets [0]",
    ),
    "negative offset": (packed({"t": entry(-4, 32, [9])}), "tensor t has data_offsets"),
    "offsets reversed": (packed({"t": entry(32, 0, [8])}), "tensor t lies at bytes 32:0"),
    "past the end": (packed({"t": entry(0, 36)}), "tensor t lies at bytes 0:36 of 32"),
    "shape and span differ": (packed({"t": entry(0, 32, [7])}), "tensor t of type F32"),
    "overlap": (packed({"a": entry(0, 20), "b": entry(16, 32)}), "tensor b overlaps"),
    "hole": (packed({"a": entry(0, 12), "b": entry(16, 32)}), "tensor b follows a hole"),
    "hole at the start": (packed({"a": entry(4, 32)}), "tensor a follows a hole"),
    "bytes behind the last": (packed({"a": entry(0, 28)}), "4 bytes behind the last tensor"),
    "truncated data": (packed({"a": entry(0, 32)}, DATA[:31]), "truncated file"),
    "name with control characters": (packed({"a\n\x1b": 1}), r"tensor 'a\n\x1b' lacks"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_one_line_naming_the_culprit(tmp_path: Path, case: str) -> None:
    data, culprit = MALFORMED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        open_safetensors(path)
    message = str(caught.value)
    assert culprit in message
    assert str(path) in message
    assert message.isprintable()


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64", "BF16"])
def test_values_are_read_as_float32(tmp_path: Path, dtype: str) -> None:
    values = np.linspace(-3, 3, 24).astype(np.float32).reshape(6, 4)
    if dtype == "BF16":
        stored = (values.view(np.uint32) >> 16).astype("<u2")
        expected = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = values.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype])
        expected = stored.astype(np.float32)
    path = tmp_path / "m.safetensors"
    # A header of odd length: the format does not promise that data is aligned.
    header = json.dumps({"t": entry(0, stored.nbytes, [6, 4], dtype)}).encode()
    path.write_bytes(packed(header + b" " * (len(header) % 2 == 0), stored.tobytes()))
    tensor = open_safetensors(path)["t"]
    np.testing.assert_array_equal(tensor.rows(0, 6), expected)
    np.testing.assert_array_equal(tensor.rows(2, 5), expected[2:5])
    assert tensor.rows(2, 5).dtype == np.float32
    assert tensor.rows(2, 5).flags.writeable


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(5, np.float32)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    opened = open_safetensors(tmp_path / "m.safetensors")
    assert set(opened) == {"a", "b"}
    for name, values in tensors.items():
        np.testing.assert_array_equal(opened[name].rows(0, len(values)), values)


def test_types_that_are_no_floats_are_listed_but_not_readable(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(packed({"ids": entry(0, 32, [4], "I64")}))
    assert not open_safetensors(path)["ids"].is_readable
