"""A malformed GGUF header is one line naming the file and the culprit, and nothing else happens."""

from dataclasses import replace
from pathlib import Path

import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.checkpoint.gguf_header import read_gguf_header
from tests.ranks.checkpoint import raw_gguf as raw
from tests.ranks.checkpoint.raw_gguf import Field, Gguf, Tensor, tiny_llama, with_tensor

HUGE = 1 << 62
Q = "blk.0.attn_q.weight"


def field_only(item: Field) -> Gguf:
    return Gguf(fields=(item,))


def tensor_only(item: Tensor, data: bytes = bytes(64)) -> Gguf:
    return Gguf(tensors=(item,), data=data)


MALFORMED: dict[str, tuple[Gguf, str]] = {
    "magic": (replace(tiny_llama(), magic=b"GGML"), "does not start with GGUF"),
    "version 1": (replace(tiny_llama(), version=1), "version 1"),
    "version 4": (replace(tiny_llama(), version=4), "version 4"),
    "big-endian": (replace(tiny_llama(), version=3 << 24), "big-endian"),
    "tensor count": (replace(tiny_llama(), tensor_count=HUGE), f"{HUGE} tensors"),
    "field count": (replace(tiny_llama(), field_count=HUGE), f"{HUGE} metadata fields"),
    "key length": (field_only(Field(raw.string("k", HUGE), raw.U8, b"\0")), str(HUGE)),
    "key past the end": (field_only(Field(raw.string("k", 60000), raw.U8, b"\0")), "60000 bytes"),
    "key not UTF-8": (field_only(Field(raw.string(b"\xff"), raw.U8, b"\0")), "not UTF-8"),
    "duplicate key": (
        Gguf(fields=(raw.number("general.a", 1), raw.number("general.a", 2))),
        "general.a appears twice",
    ),
    "value type": (field_only(Field("general.a", 13, bytes(64))), "general.a has unknown value"),
    "string length": (
        field_only(Field("general.a", raw.STRING, raw.string("x", HUGE))),
        "general.a needs",
    ),
    "string not UTF-8": (
        field_only(Field("general.a", raw.STRING, raw.string(b"\xc3"))),
        "general.a is not UTF-8",
    ),
    "boolean": (field_only(Field("general.a", raw.BOOL, b"\2")), "general.a has a boolean"),
    "array length": (
        field_only(Field("general.a", raw.ARRAY, raw.array(raw.U32, HUGE, b""))),
        "general.a needs",
    ),
    "array of strings length": (
        field_only(Field("general.a", raw.ARRAY, raw.array(raw.STRING, HUGE, b""))),
        "general.a claims",
    ),
    "string in array": (
        field_only(
            Field("general.a", raw.ARRAY, raw.array(raw.STRING, 2, raw.string("x", 1 << 40) * 2))
        ),
        "string 0 of metadata general.a",
    ),
    "string in array not UTF-8": (
        field_only(Field("general.a", raw.ARRAY, raw.array(raw.STRING, 1, raw.string(b"\xff")))),
        "general.a is not UTF-8",
    ),
    "array element type": (
        field_only(Field("general.a", raw.ARRAY, raw.array(99, 1, bytes(64)))),
        "general.a has unknown value type 99",
    ),
    "array of arrays": (
        field_only(Field("general.a", raw.ARRAY, raw.array(raw.ARRAY, 1, bytes(64)))),
        "general.a is an array of arrays",
    ),
    "alignment zero": (field_only(raw.number("general.alignment", 0)), "general.alignment is 0"),
    "alignment not a power": (
        field_only(raw.number("general.alignment", 24)),
        "general.alignment is 24",
    ),
    "alignment a string": (
        field_only(raw.text("general.alignment", "32")),
        "general.alignment is 32; it must be a power of two",
    ),
    "no dimensions": (tensor_only(Tensor("t", ())), "tensor t has 0 dimensions"),
    "five dimensions": (tensor_only(Tensor("t", (1,) * 5)), "tensor t has 5 dimensions"),
    "a million dimensions": (
        tensor_only(Tensor("t", (1,), dim_count=1_000_000)),
        "tensor t has 1000000 dimensions",
    ),
    "zero dimension": (tensor_only(Tensor("t", (4, 0))), "tensor t has a zero"),
    "product wraps to a small number": (
        tensor_only(Tensor("t", (4194305, 4194305, 211106198978564))),
        "whose product exceeds 63 bits",
    ),
    "bytes exceed 63 bits": (tensor_only(Tensor("t", (HUGE,))), "whose product exceeds"),
    "unknown tensor type": (tensor_only(Tensor("t", (4,), type=999)), "unknown type 999"),
    "removed tensor type": (tensor_only(Tensor("t", (4,), type=4)), "unknown type 4"),
    "partial block": (
        tensor_only(Tensor("t", (33, 1), type=raw.TYPE_Q8_0)),
        "rows of 33 elements, not a multiple of its block size 32",
    ),
    "unaligned offset": (tensor_only(Tensor("t", (4,), offset=4)), "tensor t has offset 4"),
    "offset past the end": (tensor_only(Tensor("t", (4,), offset=1 << 40)), "tensor t ends at"),
    "offset wraps": (tensor_only(Tensor("t", (4,), offset=(1 << 64) - 32)), "tensor t ends at"),
    "longer than the file": (tensor_only(Tensor("t", (17,))), "tensor t ends at"),
    "overlap": (
        Gguf(tensors=(Tensor("a", (16,)), Tensor("b", (4,), offset=32)), data=bytes(64)),
        "tensor b overlaps tensor a",
    ),
    "a type smaller than the data": (
        Gguf(
            tensors=(Tensor("a", (32, 2), type=raw.TYPE_Q8_0), Tensor("b", (4,), offset=128)),
            data=bytes(144),
        ),
        "tensor a of type Q8_0 ends 60 bytes before tensor b; wrong type",
    ),
    "duplicate tensor": (
        Gguf(tensors=(Tensor("a", (4,)), Tensor("a", (4,), offset=32)), data=bytes(64)),
        "tensor a appears twice",
    ),
    "name with control characters": (
        tensor_only(Tensor("t\n\x1b[31m", (0,))),
        r"tensor 't\n\x1b[31m' has a zero",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_header_is_one_line_naming_the_culprit(tmp_path: Path, case: str) -> None:
    file, culprit = MALFORMED[case]
    path = file.write(tmp_path / "m.gguf")
    with pytest.raises(UserError) as caught:
        read_gguf_header(path)
    message = str(caught.value)
    assert culprit in message
    assert str(path) in message
    assert message.isprintable()


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    whole = tiny_llama().write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"m\.gguf"):
            open_checkpoint(path)


def test_values_of_every_type_are_plain_python(tmp_path: Path) -> None:
    fields = (
        Field("a.u8", raw.U8, b"\xff"),
        Field("a.i8", 1, b"\xff"),
        Field("a.u16", 2, b"\xff\xff"),
        Field("a.i16", 3, b"\xff\xff"),
        Field("a.i32", 5, b"\xff" * 4),
        Field("a.u64", raw.U64, raw.u64((1 << 64) - 1)),
        Field("a.i64", 11, b"\xff" * 8),
        Field("a.f64", 12, bytes(6) + b"\xf0\x3f"),
        Field("a.true", raw.BOOL, b"\1"),
        raw.real("a.f32", 0.5),
        raw.text("a.text", "naïve"),
        raw.texts("a.texts", ["x", "", "é"]),
        Field("a.flags", raw.ARRAY, raw.array(raw.BOOL, 2, b"\1\0")),
        Field("a.empty", raw.ARRAY, raw.array(raw.U32, 0, b"")),
    )
    header = read_gguf_header(Gguf(fields=fields).write(tmp_path / "m.gguf"))
    assert {key.removeprefix("a."): value for key, value in header.fields.items()} == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -1,
        "i32": -1,
        "u64": (1 << 64) - 1,
        "i64": -1,
        "f64": 1.0,
        "true": True,
        "f32": 0.5,
        "text": "naïve",
        "texts": ["x", "", "é"],
        "flags": [True, False],
        "empty": [],
    }
    assert type(header.fields["a.true"]) is bool


def test_version_2_and_other_alignments_are_read(tmp_path: Path) -> None:
    fields = (raw.number("general.alignment", 128),)
    tensors = (Tensor("a", (2, 3)), Tensor("b", (1,), offset=128))
    file = Gguf(fields, tensors, bytes(132), version=2, alignment=128)
    header = read_gguf_header(file.write(tmp_path / "m.gguf"))
    assert header.tensors["a"].shape == (3, 2)
    assert header.tensors["b"].begin % 128 == 0
    assert header.tensors["b"].end == header.file.size


def test_tensors_are_where_they_were_written(tmp_path: Path) -> None:
    header = read_gguf_header(tiny_llama().write(tmp_path / "m.gguf"))
    entry = header.tensors[Q]
    assert header.file.view(entry.begin, entry.end).view("<f4")[:3].tolist() == [0, 0.5, 1]


def test_a_changed_entry_of_a_whole_model_names_the_tensor(tmp_path: Path) -> None:
    file = with_tensor(tiny_llama(), Q, dims=(4, 400))
    with pytest.raises(UserError, match=Q):
        open_checkpoint(file.write(tmp_path / "m.gguf"))
