"""The kernels that a template calls: their code, the types of their arguments, and the memory that
they need."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from buddy_pipeline.compile.draft import (
    Attention,
    Draft,
    Embedding,
    ExpertLinear,
    Gather,
    IslandCall,
    Item,
    Linear,
    TopK,
)
from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.kernels import attention, embedding, experts, linear, top_k
from buddy_pipeline.compile.kernels.attention_shape import partial_bytes
from buddy_pipeline.compile.target import Target


@dataclass(frozen=True)
class Kernel:
    """A function that an item of a template calls."""

    symbol: str
    arguments: Sequence[tuple[str, str]]
    """Names and MLIR types."""
    emit: Callable[[], str]
    """MLIR text of its module."""
    scratch: int = 0
    """Bytes that each thread needs for it."""
    partial: int = 0
    """Bytes of one partial result."""
    calls: tuple["Kernel", ...] = ()
    """The kernels that it calls itself."""

    @property
    def types(self) -> list[str]:
        """MLIR types of the arguments."""
        return [kind for _, kind in self.arguments]


def item_kernel(item: Item, target: Target) -> Kernel | None:
    """The kernel that an item calls; None where it is written out in the template."""
    if isinstance(item, Gather | IslandCall):
        return None
    if isinstance(item, Linear):
        return _linear(item.form, item.depth, target)
    if isinstance(item, ExpertLinear):
        form = weight_format(item.form)
        return Kernel(
            experts.experts_name(form),
            experts.SIGNATURE,
            partial(experts.emit_experts, target, form),
            scratch=experts.experts_scratch_bytes(target, form, item.depth),
            calls=(_linear(item.form, item.depth, target),),
        )
    if isinstance(item, TopK):
        return Kernel(top_k.TOP_K, top_k.SIGNATURE, top_k.emit_top_k)
    if isinstance(item, Attention):
        return Kernel(
            item.shape.name,
            attention.SIGNATURE,
            partial(attention.emit_attention, target, item.shape),
            scratch=attention.attention_scratch_bytes(target, item.shape),
            partial=partial_bytes(target, item.shape),
        )
    assert isinstance(item, Embedding)
    form = weight_format(item.form)
    name = embedding.embedding_name(form)
    return Kernel(name, embedding.SIGNATURE, partial(embedding.emit_embedding, target, form))


def _linear(name: str, depth: int, target: Target) -> Kernel:
    form = weight_format(name)
    return Kernel(
        linear.linear_name(form),
        linear.SIGNATURE,
        partial(linear.emit_linear, target, form),
        scratch=linear.linear_scratch_bytes(target, form, depth),
    )


def draft_kernels(draft: Draft, target: Target) -> Iterator[tuple[int, Kernel]]:
    """The kernel of each item that calls one, with the item's number, in order."""
    for number, item in enumerate(draft.items):
        kernel = item_kernel(item, target)
        if kernel is not None:
            yield number, kernel


def draft_libraries(draft: Draft, target: Target) -> dict[str, Kernel]:
    """The kernels that a template needs, by symbol."""
    found: dict[str, Kernel] = {}
    for _, kernel in draft_kernels(draft, target):
        for needed in (*kernel.calls, kernel):
            found.setdefault(needed.symbol, needed)
    return found


def thread_scratch(draft: Draft, target: Target) -> int:
    """Bytes that one thread needs while it runs the template."""
    return max((kernel.scratch for _, kernel in draft_kernels(draft, target)), default=0)


def partial_result(draft: Draft, target: Target) -> int:
    """Bytes of one partial result of its attention."""
    return max((kernel.partial for _, kernel in draft_kernels(draft, target)), default=0)
