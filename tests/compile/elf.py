"""Object files read: the machine, the undefined symbols, the visible ones.

Layout: System V ABI, "Object Files" (https://refspecs.linuxfoundation.org/elf/gabi4+).
"""

import struct
from dataclasses import dataclass

MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # SHT_SYMTAB
_GLOBAL, _WEAK = 1, 2  # STB_GLOBAL, STB_WEAK


@dataclass(frozen=True)
class ObjectFile:
    """What linking an object depends on."""

    machine: int
    undefined: frozenset[str]
    visible: frozenset[str]


def read_elf(data: bytes) -> ObjectFile:
    """Reads a 64-bit little-endian relocatable file."""
    header = _HEADER.unpack_from(data)
    identity, kind, machine, sections_at, count = (header[i] for i in (0, 1, 2, 6, 12))
    assert identity[:6] == b"\x7fELF\x02\x01" and kind == 1, "not a relocatable 64-bit ELF file"
    sections = [_SECTION.unpack_from(data, sections_at + i * _SECTION.size) for i in range(count)]
    undefined, visible = set(), set()
    for section in sections:
        if section[1] != _SYMBOL_TABLE:
            continue
        strings_at = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], _SYMBOL.size):
            name_at, info, _, home, _, _ = _SYMBOL.unpack_from(data, at)
            if info >> 4 not in (_GLOBAL, _WEAK):
                continue
            end = data.index(b"\0", strings_at + name_at)
            name = data[strings_at + name_at : end].decode()
            (visible if home else undefined).add(name)
    return ObjectFile(machine, frozenset(undefined), frozenset(visible))
