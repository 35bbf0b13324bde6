"""Experts stored one by one, seen as the stacks of matrices that transformers' classes have.

Published checkpoints hold `….experts.3.gate_proj.weight` and its like (Mixtral's: `w1`, `w2`,
`w3`), GGUF files a stack for each of the three; the classes have one parameter
`….experts.gate_up_proj` [experts, outputs, inputs], in which the rows of the gate come before those
of `up`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import StoredTensor, TensorInfo
from buddy_pipeline.ranks.checkpoint.shown import shown

_EXPERT = re.compile(
    r"(?P<list>(?:.*\.)?experts)\.(?P<number>\d{1,9})\.(?P<matrix>[a-z]+_proj|w[123])\.weight"
)
_STACK = re.compile(r"(?P<list>(?:.*\.)?experts)\.(?P<matrix>[a-z]+_proj)\.weight")
#: What Mixtral's matrices are called elsewhere.
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
#: Stacks by the matrices that each of their experts has.
_STACKS = {
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("up_proj",): "up_proj",
    ("down_proj",): "down_proj",
}


@dataclass(frozen=True)
class ExpertStack:
    """A stack of experts' matrices; of each, `members` are the tensors that its rows come from, one
    after the other. All members have one type, and all experts' have the same shapes."""

    info: TensorInfo
    members: tuple[tuple[StoredTensor, ...], ...]

    @property
    def is_readable(self) -> bool:
        return self.members[0][0].is_readable

    def rows(self, start: int, stop: int) -> np.ndarray:
        outputs = self.info.shape[1]
        return self.outputs(start * outputs, stop * outputs).reshape(-1, *self.info.shape[1:])

    def outputs(self, start: int, stop: int) -> np.ndarray:
        return self._collected(start, stop, lambda member, low, high: member.rows(low, high))

    def keeps_outputs(self, transposed: bool) -> bool:
        return all(member.keeps_outputs(transposed) for expert in self.members for member in expert)

    def stored_outputs(self, start: int, stop: int) -> np.ndarray:
        return self._collected(
            start, stop, lambda member, low, high: member.stored_outputs(low, high)
        )

    def _collected(
        self, start: int, stop: int, read: Callable[[StoredTensor, int, int], np.ndarray]
    ) -> np.ndarray:
        """Outputs of the stack, read from the members that hold them."""
        pieces = []
        outputs = self.info.shape[1]
        for number in range(start // outputs, -(-stop // outputs)):
            first = number * outputs
            for member in self.members[number]:
                rows = member.info.shape[0]
                low, high = max(start - first, 0), min(stop - first, rows)
                if low < high:
                    pieces.append(read(member, low, high))
                first += rows
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True)
class _Expert:
    """One matrix of a stack."""

    stack: StoredTensor
    number: int

    @property
    def info(self) -> TensorInfo:
        stack = self.stack.info
        return TensorInfo(stack.name, stack.shape[1:], stack.dtype)

    @property
    def is_readable(self) -> bool:
        return self.stack.is_readable

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.stack.outputs(self._first + start, self._first + stop)

    def outputs(self, start: int, stop: int) -> np.ndarray:
        return self.rows(start, stop)

    def keeps_outputs(self, transposed: bool) -> bool:
        return self.stack.keeps_outputs(transposed)

    def stored_outputs(self, start: int, stop: int) -> np.ndarray:
        return self.stack.stored_outputs(self._first + start, self._first + stop)

    @property
    def _first(self) -> int:
        return self.number * self.stack.info.shape[1]


def stack_experts(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with a stack in the place of experts' matrices.

    Raises:
        UserError: an expert lacks a matrix, or its matrices differ in shape or type from others'.
    """
    lists: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    for name, tensor in stored.items():
        found = _EXPERT.fullmatch(name)
        if found is not None:
            matrix = _MATRICES.get(found["matrix"], found["matrix"])
            numbers = lists.setdefault(found["list"], {}).setdefault(matrix, {})
            numbers[int(found["number"])] = tensor
    stacks = _stacks(path, lists)
    used = {id(member) for stack in stacks.values() for each in stack.members for member in each}
    return {**{name: t for name, t in stored.items() if id(t) not in used}, **stacks}


def is_stack(name: str) -> bool:
    """Whether `join_stacks` takes the tensor of this name for a stack."""
    return _STACK.fullmatch(name) is not None


def join_stacks(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint that has a stack for each kind of experts' matrices, called as
    these with no number, with the stacks of transformers' classes in their place.

    Raises:
        UserError: as `stack_experts`.
    """
    lists: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    left = dict(stored)
    for name, tensor in stored.items():
        found = _STACK.fullmatch(name)
        if found is not None:
            numbers = range(tensor.info.shape[0])
            experts: dict[int, StoredTensor] = {n: _Expert(tensor, n) for n in numbers}
            lists.setdefault(found["list"], {})[found["matrix"]] = experts
            del left[name]
    return {**left, **_stacks(path, lists)}


def _stacks(
    path: Path, lists: Mapping[str, Mapping[str, dict[int, StoredTensor]]]
) -> dict[str, ExpertStack]:
    """The stacks of lists of experts, whose matrices are given by kind and by expert's number."""
    result = {}
    for module, matrices in lists.items():
        for parts, stack in _STACKS.items():
            if not matrices.keys() >= set(parts):
                continue
            if parts == ("up_proj",) and "gate_proj" in matrices:
                continue
            name = f"{module}.{stack}"
            result[name] = _stack(path, name, [matrices[part] for part in parts])
    return result


def _stack(path: Path, name: str, parts: list[dict[int, StoredTensor]]) -> ExpertStack:
    """A stack from its parts, by expert's number."""
    count = max(len(numbers) for numbers in parts)
    members = []
    for number in range(count):
        if any(number not in numbers for numbers in parts):
            raise UserError(
                f"{path}: expert {number} of {shown(name)} lacks a matrix that others have; the"
                " checkpoint is incomplete, download it again"
            )
        members.append(tuple(numbers[number] for numbers in parts))
    first = members[0]
    kinds = {(member.info.dtype, member.info.shape[1:]) for expert in members for member in expert}
    heights = {tuple(member.info.shape[:1] for member in expert) for expert in members}
    if len(kinds) > 1 or len(heights) > 1 or len(first[0].info.shape) != 2:
        raise UserError(
            f"{path}: the matrices of the experts of {shown(name)} differ in shape or type; the"
            " checkpoint is damaged, download it again"
        )
    outputs = sum(member.info.shape[0] for member in first)
    shape = (count, outputs, first[0].info.shape[1])
    return ExpertStack(TensorInfo(name, shape, first[0].info.dtype), tuple(members))
