"""GGUF files put together byte by byte, so that any part of one can be wrong."""

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
TYPE_F32, TYPE_Q8_0, TYPE_Q2_K = 0, 8, 10
ALIGNMENT = 32


def string(text: str | bytes, claimed: int | None = None) -> bytes:
    """A string, claiming to be `claimed` bytes long."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if claimed is None else claimed) + data


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def array(element_type: int, count: int, data: bytes) -> bytes:
    """The value of an array field that claims `count` elements."""
    return u32(element_type) + u64(count) + data


@dataclass(frozen=True)
class Field:
    """A metadata field; `key` may be packed bytes with a wrong length."""

    key: str | bytes
    type: int
    value: bytes

    def packed(self) -> bytes:
        key = string(self.key) if isinstance(self.key, str) else self.key
        return key + u32(self.type) + self.value


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry; `dims` are in the file's order, fastest first."""

    name: str
    dims: tuple[int, ...]
    type: int = TYPE_F32
    offset: int = 0
    dim_count: int | None = None

    def packed(self) -> bytes:
        count = len(self.dims) if self.dim_count is None else self.dim_count
        dims = b"".join(u64(dim) for dim in self.dims)
        return string(self.name) + u32(count) + dims + u32(self.type) + u64(self.offset)


@dataclass(frozen=True)
class Gguf:
    """A whole file; the counts are true unless given."""

    fields: tuple[Field, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    field_count: int | None = None
    alignment: int = field(default=ALIGNMENT)

    def write(self, path: Path) -> Path:
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        field_count = len(self.fields) if self.field_count is None else self.field_count
        head = self.magic + u32(self.version) + u64(tensor_count) + u64(field_count)
        head += b"".join(part.packed() for part in (*self.fields, *self.tensors))
        head += bytes(-len(head) % self.alignment)
        path.write_bytes(head + self.data)
        return path


def number(key: str, value: int) -> Field:
    return Field(key, U32, u32(value))


def real(key: str, value: float) -> Field:
    return Field(key, F32, struct.pack("<f", value))


def text(key: str, value: str) -> Field:
    return Field(key, STRING, string(value))


def texts(key: str, values: list[str]) -> Field:
    return Field(key, ARRAY, array(STRING, len(values), b"".join(map(string, values))))


def tiny_llama() -> Gguf:
    """The smallest valid file: one layer, two heads of two dimensions, three tokens, F32."""
    shapes = {
        "token_embd.weight": (4, 3),
        "output_norm.weight": (4,),
        "blk.0.attn_norm.weight": (4,),
        "blk.0.ffn_norm.weight": (4,),
        "blk.0.attn_q.weight": (4, 4),
        "blk.0.attn_k.weight": (4, 2),
        "blk.0.attn_v.weight": (4, 2),
        "blk.0.attn_output.weight": (4, 4),
        "blk.0.ffn_gate.weight": (4, 8),
        "blk.0.ffn_up.weight": (4, 8),
        "blk.0.ffn_down.weight": (8, 4),
    }
    tensors, data = [], b""
    for name, dims in shapes.items():
        count = dims[0] * (dims[1] if len(dims) == 2 else 1)
        tensors.append(Tensor(name, dims, offset=len(data)))
        data += struct.pack(f"<{count}f", *(0.5 * i for i in range(count)))
        data += bytes(-len(data) % ALIGNMENT)
    fields = (
        text("general.architecture", "llama"),
        number("llama.block_count", 1),
        number("llama.context_length", 16),
        number("llama.embedding_length", 4),
        number("llama.feed_forward_length", 8),
        number("llama.attention.head_count", 2),
        number("llama.attention.head_count_kv", 1),
        real("llama.attention.layer_norm_rms_epsilon", 1e-5),
        text("tokenizer.ggml.model", "gpt2"),
        texts("tokenizer.ggml.tokens", ["a", "b", "c"]),
        number("tokenizer.ggml.eos_token_id", 2),
    )
    return Gguf(fields, tuple(tensors), data)


def with_fields(file: Gguf, *fields: Field) -> Gguf:
    """`file` with `fields` in place of those of the same key, or added."""
    keys = {item.key for item in fields}
    kept = tuple(item for item in file.fields if item.key not in keys)
    return replace(file, fields=kept + fields)


def without_field(file: Gguf, key: str) -> Gguf:
    return replace(file, fields=tuple(item for item in file.fields if item.key != key))


def with_tensor(file: Gguf, name: str, /, **changes: object) -> Gguf:
    """`file` with `changes` made to the entry of one tensor."""
    return replace(
        file,
        tensors=tuple(
            replace(item, **changes) if item.name == name else item  # type: ignore[arg-type]
            for item in file.tensors
        ),
    )
