"""Reading little-endian values off a mapped GGUF file without ever passing its end."""

import struct

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.mapped_file import MappedFile

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a file; every read checks what is left and names what it was reading.

    Attributes:
        position: offset of the next byte to read.
    """

    def __init__(self, file: MappedFile) -> None:
        self.position = 0
        self._file = file
        self._buffer = file.buffer

    @property
    def remaining(self) -> int:
        return self._file.size - self.position

    def take(self, length: int, what: str) -> bytes:
        """Read `length` bytes.

        Raises:
            UserError: fewer are left; names `what`.
        """
        begin = self.position
        if length > self.remaining:
            raise UserError(
                f"{self._file.path}: {what} needs {length} bytes at byte {begin} "
                f"of {self._file.size}; truncated or damaged file"
            )
        self.position = begin + length
        return self._buffer[begin : self.position]

    def u32(self, what: str) -> int:
        """Read an unsigned 32-bit integer."""
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        """Read an unsigned 64-bit integer."""
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str) -> str:
        """Read a length and that many bytes of UTF-8."""
        return self._decode(self.take(self.u64(f"length of {what}"), what), what)

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings; a vocabulary has 100,000, so this is the loop that must be fast.

        Raises:
            UserError: as for `take`, or a string is not UTF-8.
        """
        # Each string has at least its length, so `count` is bounded before anything is built.
        if count * _U64.size > self.remaining:
            raise UserError(
                f"{self._file.path}: {what} claims {count} strings with {self.remaining} bytes "
                "left; truncated or damaged file"
            )
        buffer, size, position = self._buffer, self._file.size, self.position
        length_at = _U64.unpack_from
        items: list[bytes] = []
        for _ in range(count):
            end = position + 8
            if end <= size:
                position, end = end, end + length_at(buffer, position)[0]
            if end > size:
                raise UserError(
                    f"{self._file.path}: string {len(items)} of {what} ends at byte {end} of "
                    f"{size}; truncated or damaged file"
                )
            items.append(buffer[position:end])
            position = end
        self.position = position
        try:
            return [item.decode() for item in items]
        except UnicodeDecodeError:
            return [self._decode(item, what) for item in items]

    def _decode(self, data: bytes, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._file.path}: {what} is not UTF-8 (byte {error.start}); damaged file"
            ) from None
