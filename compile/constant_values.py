"""Values of a graph's constant parts, also as they would be for a key before the token."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import Node


class NotConstant(Exception):
    """A value depends on the token, its position or a parameter; names the node."""


class ConstantValues:
    """Evaluates nodes that only depend on buffers.

    buffers: values by placeholder. away: the place of the key relative to the token, 0 or less.
    The graph is that of one token, whose only key is its own; what a model computes from the number
    of a key, counted by `arange` or `cumsum` or found in a table of all, is moved by `away`.
    """

    def __init__(self, buffers: Mapping[str, np.ndarray], away: int = 0) -> None:
        self._buffers = buffers
        self._away = away
        self._known: dict[str, torch.Tensor] = {}
        self.read: set[str] = set()
        """The buffers that the values depend on."""

    def value(self, node: Node) -> torch.Tensor:
        """The value on the CPU; raises NotConstant."""
        if node.name not in self._known:
            self._known[node.name] = self._evaluate(node)
        return self._known[node.name]

    def _evaluate(self, node: Node) -> torch.Tensor:
        if node.op == "placeholder" and node.name in self._buffers:
            self.read.add(node.name)
            return torch.from_numpy(np.array(self._buffers[node.name]))
        if node.op != "call_function":
            raise NotConstant(node.name)
        args: Any
        kwargs: Any
        args, kwargs = torch.fx.node.map_aggregate(
            torch.fx.node.map_arg((node.args, dict(node.kwargs)), self.value),
            lambda item: torch.device("cpu") if isinstance(item, torch.device) else item,
        )
        kwargs = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        if node.target is torch.ops.aten.slice.Tensor:
            args = self._moved(args)
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        return result + self._away if _counts_keys(node, result) else result

    def _moved(self, args: tuple[object, ...]) -> tuple[object, ...]:
        """The slice that takes the last of a table of all keys takes the one that is meant."""
        defaults: tuple[object, ...] = (0, None, None, 1)
        table, dim, start, end, step = [*args, *defaults[len(args) - 1 :]]
        assert isinstance(table, torch.Tensor) and isinstance(dim, int)
        size = table.shape[dim]
        if step != 1 or not isinstance(start, int) or size < 2:
            return args
        first = start % size if start < 0 else start
        last = size if end is None or int(end) >= size else int(end) % size  # type: ignore[call-overload]
        if last - first != 1 or first + self._away < 1:
            return args
        return table, dim, first + self._away, last + self._away, 1


def _counts_keys(node: Node, result: torch.Tensor) -> bool:
    """Whether a value is the number of the only key."""
    if node.target in (torch.ops.aten.arange.default, torch.ops.aten.arange.start):
        return result.numel() == 1 and int(result) == 0
    if node.target is torch.ops.aten.cumsum.default:
        return result.shape[node.args[1]] == 1  # type: ignore[index]
    return False
