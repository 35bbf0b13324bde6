"""What an object file says of itself: its machine, its symbols, and the note that codegen left.

Reads ELF (https://refspecs.linuxfoundation.org/elf/gabi4+/contents.html), 64 bits, little-endian:
the only kind that targets here have.
"""

import struct
from dataclasses import dataclass

_MACHINES = {62: "x86-64", 183: "AArch64", 243: "RISC-V"}
_SYMBOL_TABLE = 2  # sh_type of .symtab
_FUNCTION = 2  # the low bits of st_info
_GLOBAL = 1  # the high bits of st_info
#: How the note in `.comment` starts; see `note`.
_NOTE = "buddy-pipeline:"


@dataclass(frozen=True)
class Symbol:
    """One name in an object."""

    name: str
    bytes: int
    is_function: bool
    is_global: bool
    is_defined: bool


@dataclass(frozen=True)
class ObjectFile:
    """What is known of an object file."""

    machine: str
    code_bytes: int
    symbols: tuple[Symbol, ...]
    note: str
    """What and for which CPU it was compiled; "" if it is not one of ours."""


def note(symbols: tuple[str, ...], cpu: str, triple: str) -> str:
    """The text that code generation leaves in an object's `.comment` section."""
    return f"{_NOTE} {', '.join(symbols[:1])} for {cpu} ({triple})"


def read_object_file(data: bytes) -> ObjectFile:
    """Parses an object file; ValueError if it is cut short or no ELF object of this kind."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no 64-bit little-endian ELF object")
    try:
        return _read(data)
    except (struct.error, IndexError) as error:
        raise ValueError("it is cut short") from error


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    data: bytes
    link: int


def _read(data: bytes) -> ObjectFile:
    (machine,) = struct.unpack_from("<H", data, 18)
    sections = _sections(data)
    symbols: list[Symbol] = []
    for section in sections:
        if section.kind == _SYMBOL_TABLE:
            symbols += _symbols(section.data, sections[section.link].data)
    comment = next((s.data for s in sections if s.name == ".comment"), b"")
    notes = [text.decode("utf-8", "replace") for text in comment.split(b"\0")]
    return ObjectFile(
        machine=_MACHINES.get(machine, f"machine {machine}"),
        code_bytes=sum(len(s.data) for s in sections if s.name.startswith(".text")),
        symbols=tuple(symbols),
        note=next((t.removeprefix(_NOTE).strip() for t in notes if t.startswith(_NOTE)), ""),
    )


def _sections(data: bytes) -> list[_Section]:
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, offset + number * size) for number in range(count)
    ]
    names = _content(data, headers[names_at])
    return [_Section(_text(names, h[0]), h[1], h[2], _content(data, h), h[6]) for h in headers]


def _content(data: bytes, header: tuple[int, ...]) -> bytes:
    no_bits = 8  # sh_type of .bss, which has no bytes in the file
    start, size = header[4], header[5]
    if header[1] == no_bits:
        return b""
    if start + size > len(data):
        raise IndexError
    return data[start : start + size]


def _symbols(table: bytes, names: bytes) -> list[Symbol]:
    found = []
    for name, info, _, section, _, size in struct.iter_unpack("<IBBHQQ", table):
        text = _text(names, name)
        if text:
            kind, binding = info & 15, info >> 4
            found.append(Symbol(text, size, kind == _FUNCTION, binding == _GLOBAL, section != 0))
    return found


def _text(names: bytes, start: int) -> str:
    end = names.find(b"\0", start)
    if end < 0:
        raise IndexError
    return names[start:end].decode("utf-8", "replace")
