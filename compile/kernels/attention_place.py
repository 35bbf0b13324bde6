"""What the parts of the attention kernel are given, and where a token's queries, keys, values and
outputs lie."""

from dataclasses import dataclass, replace

from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.kernels.attention_store import layer_base
from buddy_pipeline.compile.kernels.step import step_word
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text

#: Argument names and types of the kernel: queries, keys, values and outputs with their row strides
#: (elements), KV heads and this layer's offset in the cache, what scores are made with, the step's
#: record, thread id.
SIGNATURE = [
    ("q", "!llvm.ptr"),
    ("ldq", "i64"),
    ("k", "!llvm.ptr"),
    ("ldk", "i64"),
    ("v", "!llvm.ptr"),
    ("ldv", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("kv_heads", "i64"),
    ("kv_offset", "i64"),
    ("scale", "f32"),
    ("window", "i64"),
    ("softcap", "f32"),
    ("sinks", "!llvm.ptr"),
    ("slopes", "!llvm.ptr"),
    ("step", "!llvm.ptr"),
    ("tid", "i64"),
]

#: The same for the parts that compute: keys and values are in the cache by then; each thread has
#: its scratch.
PART_ARGS = [
    *[(name, kind) for name, kind in SIGNATURE if name not in ("k", "ldk", "v", "ldv")],
    ("scratch", "!llvm.ptr"),
]


@dataclass(frozen=True)
class Place:
    """Addresses that belong to one token and KV head."""

    q: str
    keys: str
    values: str
    out: str
    last: str
    sinks: str
    slopes: str


def place_of(t: Text, shape: AttentionShape, token: str, head: str) -> Place:
    """Finds a token's queries, its slot's keys and values, and its outputs."""
    positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
    slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
    last = t.load(t.gep(positions, token, "i64"), "i64", 8)
    slot = t.load(t.gep(slots, token, "i64"), "i64", 8)
    element = shape.element
    layer, capacity = layer_base(t, shape, slot)
    key_head = t.mul(capacity, t.constant(shape.layer.key_elements))
    values = t.gep(layer, t.mul(key_head, "%kv_heads"), element)
    value_head = t.mul(capacity, t.constant(shape.layer.value_elements))
    q = t.gep("%q", t.mul(token, "%ldq"))
    out = t.gep("%out", t.mul(token, "%ldo"))
    first_head = t.mul(head, t.constant(shape.group))
    return Place(
        q=t.gep(q, t.mul(head, t.constant(shape.group * shape.key))),
        keys=t.gep(layer, t.mul(head, key_head), element),
        values=t.gep(values, t.mul(head, value_head), element),
        out=t.gep(out, t.mul(head, t.constant(shape.group * shape.value))),
        last=last,
        sinks=t.gep("%sinks", first_head) if shape.sinks else "%sinks",
        slopes=t.gep("%slopes", first_head) if shape.slopes else "%slopes",
    )


def from_head(t: Text, shape: AttentionShape, at: Place, start: int) -> Place:
    """The place of the query heads from `start` on."""
    return replace(
        at,
        q=t.gep(at.q, start * shape.key),
        out=t.gep(at.out, start * shape.value),
        sinks=t.gep(at.sinks, start) if shape.sinks else at.sinks,
        slopes=t.gep(at.slopes, start) if shape.slopes else at.slopes,
    )
