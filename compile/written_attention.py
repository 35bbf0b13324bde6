"""Attention that a model's class writes out as products and a softmax, made the attention op.

In a graph of one token the only key is the token's own, so such a softmax is over one score. What
leads to it must be a product with the key, factors, a causal mask, a window or a bias by distance;
anything else is refused, because the kernel would compute something else than the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

import buddy_pipeline.compile.attention_op  # noqa: F401  (defines the op)
from buddy_pipeline.compile.constant_values import ConstantValues, NotConstant
from buddy_pipeline.compile.fx_nodes import arguments, is_view, module_path, value_of
from buddy_pipeline.partition.errors import UserError

_ATEN = torch.ops.aten
_SOFTMAX = (_ATEN.softmax.int, _ATEN._softmax.default)
_PRODUCTS = (_ATEN.matmul.default, _ATEN.bmm.default)
_FACTORS = {_ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.div.Tensor, _ATEN.div.Scalar}
_SUMS = {_ATEN.add.Tensor, _ATEN.add.Scalar}
_BOUNDS = {_ATEN.max.other, _ATEN.maximum.default}
_NEVER_REACHED = -1e30  # a lower bound of scores that only masks reach
_CHOICES = {_ATEN.where.self, _ATEN.masked_fill.Scalar, _ATEN.masked_fill.Tensor}


def fold_written_attention(
    graph: Graph, buffers: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Replaces every written attention in `graph`; returns the new constants by placeholder.

    Raises UserError naming node and module for one that is more than the kernel computes.
    """
    slopes: dict[str, np.ndarray] = {}
    for node in list(graph.nodes):
        if node.target is _ATEN.scaled_dot_product_attention.default:
            _fold(graph, node, _called(node, buffers), slopes)
        elif node.target in _SOFTMAX and value_of(node).shape[arguments(node)[1]] == 1:
            scores = _Scores(node, buffers)
            _fold(graph, _product_with_values(node), scores, slopes)
    graph.eliminate_dead_code()
    return slopes


class _Scores:
    """What a softmax is of, followed back to the product of query and key.

    scale: what the product is multiplied with. window: positions that a token sees, 0 for all.
    slopes: float32 [heads], what a score gains for each position on; None where it gains nothing.
    """

    def __init__(self, softmax: Node, buffers: Mapping[str, np.ndarray]) -> None:
        self.scale, self.window = 1.0, 0
        self.slopes: np.ndarray | None = None
        self.values: Node | None = None
        self._buffers = buffers
        self._where = softmax
        node: Node = arguments(softmax)[0]
        while node.target not in (*_PRODUCTS, _ATEN.baddbmm.default):
            node = self._before(node)
        if node.target is _ATEN.baddbmm.default:
            bias, self.query, self.key = arguments(node)[:3]
            self._add(bias, self.scale * float(node.kwargs.get("beta", 1)))  # type: ignore[arg-type]
            self.scale *= float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
        else:
            self.query, self.key = arguments(node)[:2]

    def _before(self, node: Node) -> Node:
        """One step back from `node` to where its scores come from."""
        if node.op != "call_function":
            raise self._refused(node)
        if is_view(node):
            return node.all_input_nodes[0]
        if node.target in _CHOICES:
            return self._chosen(node)
        if node.target in _BOUNDS:
            scores, bound = arguments(node)
            least = self._constant(bound)
            if least is None or float(least) > _NEVER_REACHED:
                raise self._refused(node)
            return scores
        if node.target in _FACTORS | _SUMS:
            left, right = arguments(node)[:2]
            if isinstance(left, Node) and self._constant(left) is not None:
                if node.target in (_ATEN.div.Tensor, _ATEN.div.Scalar):
                    raise self._refused(node)
                left, right = right, left
            if node.target in _SUMS:
                self._add(right, self.scale * float(node.kwargs.get("alpha", 1)))  # type: ignore[arg-type]
            else:
                self._multiply(node, right)
            return left
        raise self._refused(node)

    def _multiply(self, node: Node, by: Node | float) -> None:
        value = by if isinstance(by, (int, float)) else self._constant(by)
        if value is None or (isinstance(value, torch.Tensor) and value.numel() != 1):
            raise self._refused(node)
        factor = float(value)
        self.scale *= 1 / factor if node.target in (_ATEN.div.Tensor, _ATEN.div.Scalar) else factor

    def _add(self, bias: Node | float, factor: float) -> None:
        """A bias: nothing for the token's own key, and falling evenly with distance."""
        if isinstance(bias, (int, float)):
            return  # the same for every key: a softmax does not see it
        near, one, three = (self._constant(bias, away) for away in (0, -1, -3))
        if near is None or one is None or three is None:
            raise self._refused(bias)
        slope = (near - one).flatten().float() * factor
        if not torch.allclose((near - three).flatten().float() * factor, 3 * slope):
            raise self._refused(bias)
        if slope.any():
            self.slopes = slope.numpy()

    def _chosen(self, node: Node) -> Node:
        """Scores where a constant mask allows them."""
        if node.target is _ATEN.where.self:
            mask, scores, _ = arguments(node)
            allowed = self._constant(mask)
        else:
            scores, mask, _ = arguments(node)
            hidden = self._constant(mask)
            allowed = None if hidden is None else ~hidden
        if allowed is None or not bool(allowed.all()):
            raise self._refused(node)
        return scores

    def _constant(self, node: Node, away: int = 0) -> torch.Tensor | None:
        """A constant's value; None for anything else. Notes what a mask among it hides."""
        values = ConstantValues(self._buffers, away)
        try:
            value = values.value(node)
        except NotConstant:
            return None
        for name in values.read:
            self._note_mask(node, self._buffers[name])
        return value

    def _note_mask(self, node: Node, table: np.ndarray) -> None:
        """A table of all queries by all keys must let a query see all before it, or a window."""
        if table.ndim < 2 or table.shape[-1] != table.shape[-2] or table.shape[-1] < 2:
            return
        seen = table.reshape(-1, *table.shape[-2:])[0] != 0
        window = int(seen[-1].sum())
        size = len(seen)
        band = np.tril(np.ones((size, size), bool)) & ~np.tril(np.ones((size, size), bool), -window)
        if not np.array_equal(seen, band):
            raise self._refused(node)
        if window < size:
            self.window = window

    def _refused(self, node: Node) -> UserError:
        return _refusal(self._where, f"{node.target} on its scores")


@dataclass
class _Call:
    """The same of a call of PyTorch's attention function."""

    query: Node
    key: Node
    values: Node
    scale: float
    window: int = 0
    slopes: np.ndarray | None = field(default=None)


def _called(node: Node, buffers: Mapping[str, np.ndarray]) -> _Call:
    query, key, values, mask = (*arguments(node), None)[:4]
    if mask is None:
        mask = node.kwargs.get("attn_mask")
    if isinstance(mask, Node):
        try:
            free = not ConstantValues(buffers).value(mask).any()
        except NotConstant:
            free = False
        if not free:
            raise _refusal(node, "a mask of its own")
    scale = node.kwargs.get("scale") or value_of(query).shape[-1] ** -0.5
    return _Call(query, key, values, float(scale))  # type: ignore[arg-type]


def _product_with_values(softmax: Node) -> Node:
    """The product of the weights with the values."""
    node = softmax
    while node.target not in _PRODUCTS:
        users = [user for user in node.users if user.users or user.op == "output"]
        if len(users) != 1 or not (is_view(users[0]) or users[0].target in _PRODUCTS):
            raise _refusal(softmax, "weights that do not only weigh values")
        node = users[0]
    return node


def _fold(
    graph: Graph, end: Node, scores: _Scores | _Call, constants: dict[str, np.ndarray]
) -> None:
    """Puts the attention op in place of `end`, which gives [… heads, 1, value]."""
    values = arguments(end)[1] if scores.values is None else scores.values
    given = [scores.query, scores.key, values]
    stack = end.meta.get("nn_module_stack")

    def add(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        plain = torch.fx.node.map_arg(args, value_of)
        node.meta = {"val": target(*plain), "nn_module_stack": stack}
        return node

    slopes = None
    if scores.slopes is not None:
        with graph.inserting_before(next(iter(graph.nodes))):
            slopes = graph.placeholder(f"slopes_{len(constants)}")
        kind = value_of(scores.query)
        slopes.meta = {"val": kind.new_empty(len(scores.slopes))}
        constants[slopes.name] = scores.slopes
    with graph.inserting_before(end):
        # Keys lie as [… key, 1] or [… 1, key]: with one key the bytes are the same.
        sizes = [_head_size(given[0]), _head_size(given[0]), value_of(values).shape[-1]]
        heads = [
            add(
                _ATEN.reshape.default,
                node,
                [1, value_of(node).numel() // size, 1, size],
            )
            for node, size in zip(given, sizes, strict=True)
        ]
        attended = add(
            torch.ops.bp.attention.default,
            *[*heads, None, slopes, scores.scale, scores.window, 0.0],
        )
        result = add(_ATEN.reshape.default, attended, list(value_of(end).shape))
    end.replace_all_uses_with(result)


def _head_size(query: Node) -> int:
    return int(value_of(query).shape[-1])


def _refusal(node: Node, what: str) -> UserError:
    return UserError(
        f"node {node.name} of module '{module_path(node)}' is attention written out, with {what}, "
        "which has no kernel yet"
    )
