"""The args table of one partition: which of its words holds what.

Inputs, outputs, parameters, constants, temporaries, then the KV offset of each attention.
"""

from collections.abc import Collection

from buddy_pipeline.compile.binding import Bound
from buddy_pipeline.compile.manifest import Parameter


class ArgsTable:
    """The words of one table; temporaries are added as values need them, and shared in turn."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._parameters = len(bound.passed)
        self._constants = self._parameters + len(bound.parameters)
        self._temporaries = self._constants + len(bound.constants)
        self.scratch: list[int] = []
        """Row bytes of each temporary."""
        self._free: list[int] = []  # indices of temporaries

    def parameter(self, parameter: Parameter) -> int:
        """The word that holds a parameter's address."""
        return self._parameters + self._bound.parameters.index(parameter)

    def constant(self, name: str) -> int:
        """The word that holds a constant's address."""
        return self._constants + self._bound.constants.index(name)

    def take(self, row_bytes: int) -> int:
        """The word of a temporary with rows of this size: a free one, or a new one."""
        for index in self._free:
            if self.scratch[index] == row_bytes:
                self._free.remove(index)
                return self._scratch_word(index)
        self.scratch.append(row_bytes)
        return self._scratch_word(len(self.scratch) - 1)

    def free_all_but(self, held: Collection[int]) -> None:
        """Frees every temporary whose word is not held."""
        for index in range(len(self.scratch)):
            if self._scratch_word(index) not in held and index not in self._free:
                self._free.append(index)

    def kv_offset(self, attention: int) -> int:
        """The word with the KV offset of an attention; known when all temporaries are."""
        return self._scratch_word(len(self.scratch)) + attention

    def _scratch_word(self, index: int) -> int:
        return self._temporaries + index
