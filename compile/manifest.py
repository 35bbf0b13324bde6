"""The manifest: what a stage needs to run, as plain data between the compiler and the ranks.

The compiler writes one plan a model (JSON); a rank picks its partitions from it. Nothing here
imports torch or MLIR.
"""

import base64
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import msgspec

from buddy_pipeline.partition.layers import BlockRole
from buddy_pipeline.partition.sealed_json import seal, unseal

#: Raised whenever the meaning of a field changes; older plans are then made anew.
FORMAT_VERSION = 4
#: Every value's row is padded to this many elements, whatever the target's vectors, so that ranks
#: with different CPUs agree on what crosses.
ROW_PAD = 32
#: Positions whose keys lie side by side; a slot's KV memory holds a whole number of blocks.
KV_BLOCK = 32
#: Positions of one softmax and partial result of attention; a whole number of blocks.
KV_SPAN = 256
#: Elements of a cached head that share a scale where the cache is int8.
KV_SCALE_BLOCK = 32
#: Attention splits caches into spans while (token, KV head) pairs are fewer than this per thread.
SPLIT_UNITS = 4


class StepWord(Enum):
    """Index of each 8-byte word in the step record that compiled code reads."""

    TOKENS = 0  # tokens in the step
    ROWS = 1  # tokens whose logits are wanted
    ROW_INDEX = 2  # address of int64 [ROWS]: which tokens those are
    POSITIONS = 3  # address of int64 [TOKENS]
    SLOTS = 4  # address of int64 [TOKENS]
    TEAM = 5  # threads in the team
    BARRIER = 6  # address of the barrier's two counters
    SLOT_BASE = 7  # address of a table of addresses: KV memory of each slot
    SLOT_CAPACITY = 8  # address of int64: positions that each slot's memory holds
    SCRATCH = 9  # address of the threads' scratch
    SCRATCH_STRIDE = 10  # bytes of scratch of one thread
    PARTIALS = 11  # address of partial results of attention
    PROFILE = 12  # address of the threads' profile tables; 0: nobody looks
    PROFILE_STRIDE = 13  # bytes of one thread's table
    PROFILE_OTHER = 14  # slot that counts the regions which have none of their own


@dataclass(frozen=True)
class Value:
    """A row of numbers for each token: an activation."""

    name: str
    elements: int  # meaningful elements of a row
    dtype: str  # "f32" or "i64"

    @property
    def stride(self) -> int:
        """Elements from one row to the next."""
        return -(-self.elements // ROW_PAD) * ROW_PAD

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.stride * (8 if self.dtype == "i64" else 4)


@dataclass(frozen=True)
class WeightPart:
    """One matrix inside a packed parameter, or a stack of them, as experts have; of alternative
    names the first that exists counts."""

    weight: tuple[str, ...]
    bias: tuple[str, ...]  # empty: no bias
    shape: tuple[int, ...]  # as the checkpoint stores it; a stack is [matrices, …, …]
    transposed: bool  # stored as [inputs, outputs]

    @property
    def matrices(self) -> int:
        """Matrices of the stack; 1 where it is none."""
        return self.shape[0] if self.is_stack else 1

    @property
    def is_stack(self) -> bool:
        """Whether there is a matrix for each expert."""
        return len(self.shape) == 3

    @property
    def rows(self) -> int:
        """Outputs of one matrix."""
        return self.shape[-1] if self.transposed else self.shape[-2]

    @property
    def columns(self) -> int:
        """Inputs of one matrix."""
        return self.shape[-2] if self.transposed else self.shape[-1]

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The shape of the bias, if there is one."""
        return (*self.shape[:-2], self.rows)


@dataclass(frozen=True)
class Parameter:
    """A weight as a template wants it.

    `layout` is "panels" (packed in the weight format `form`, matrices one after the other, each
    padded to whole panels), "panel_bias" (biases of such matrices in the same order, f32, padded
    with zeros), or "plain" (f32, as stored). Where so many equal parts of the panels take `turns`,
    first come the first panels of all parts, then the second ones, and so on.
    """

    layout: str
    parts: tuple[WeightPart, ...]
    panel: int  # outputs of one panel; 0 for plain
    form: str = "f32"
    turns: int = 1


@dataclass(frozen=True)
class Constant:
    """A small array that the model computes by itself, such as rotary frequencies."""

    dtype: str
    shape: tuple[int, ...]
    data: str  # base64 of little-endian bytes

    def bytes(self) -> bytes:
        """The array's memory."""
        return base64.b64decode(self.data)


@dataclass(frozen=True)
class KvLayer:
    """The KV cache of one attention kernel, of type `dtype` ("f32", "bf16", "f16" or "int8").

    Keys are `[kv head][block of positions][key elements][KV_BLOCK]`, values `[kv head][position]
    [value elements]`. In int8 the scales (f32) of a block of keys, `[key / 32][KV_BLOCK]`, lie
    behind its bytes, and those of a value behind the value, and count as elements too.
    """

    heads: int
    key: int
    value: int
    dtype: str

    @property
    def element_bytes(self) -> int:
        """Bytes of one cached element."""
        return {"f32": 4, "int8": 1}.get(self.dtype, 2)

    @property
    def value_stride(self) -> int:
        """Numbers of one cached value, padded to whole vectors of any target."""
        return -(-self.value // 16) * 16

    @property
    def key_elements(self) -> int:
        """Elements that a key takes, with its scales."""
        return self.key + self._scale_elements(self.key)

    @property
    def value_elements(self) -> int:
        """Elements from one value of a head to the next."""
        return self.value_stride + self._scale_elements(self.value)

    @property
    def position_elements(self) -> int:
        """Elements that one position takes."""
        return self.heads * (self.key_elements + self.value_elements)

    def _scale_elements(self, numbers: int) -> int:
        return 4 * -(-numbers // KV_SCALE_BLOCK) if self.dtype == "int8" else 0


@dataclass(frozen=True)
class Template:
    """A compiled partition shared by all partitions of one structure.

    `scratch` lists the row bytes of each temporary, `thread_scratch` the bytes one thread needs
    besides. `objects` are the keys of the object files: its own first, then the kernel libraries.
    `regions` names what the threads do together between two barriers, in order.
    """

    name: str
    symbol: str
    objects: tuple[str, ...]
    scratch: tuple[int, ...]
    thread_scratch: int
    partial: int  # bytes of one partial result of attention
    regions: tuple[str, ...]


@dataclass(frozen=True)
class PartitionPlan:
    """One partition: a template and what its arguments are bound to, in argument order:
    inputs, outputs, parameters, constants, scratch, then the KV offset of each attention."""

    name: str
    unit: str  # "positions", "prelude", "postlude" or the layer's number
    template: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    constants: tuple[str, ...]
    kv: tuple[KvLayer, ...]


@dataclass(frozen=True)
class Plan:
    """A whole model, planned for one target."""

    key: str
    made_with: dict[str, str]  # package versions
    variant: str
    strategy: str  # the split strategy's name
    sharing: str  # what like partitions share: compile.granularity.Sharing
    target: dict[str, Any]
    layers: int
    vocab_size: int
    driver: str  # object key
    token_input: str
    position_input: str
    result: str  # value that holds the logits
    values: dict[str, Value]
    constants: dict[str, Constant]
    templates: dict[str, Template]
    partitions: tuple[PartitionPlan, ...]
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)  # canonical name: shape

    def for_rank(self, layers: range, role: BlockRole) -> tuple[PartitionPlan, ...]:
        """The partitions that a rank with these layers and this role runs, in order."""
        return tuple(p for p in self.partitions if runs_unit(p.unit, layers, role))

    def crossing(self, boundary: int) -> tuple[Value, ...]:
        """The values that pass from the block ending before layer `boundary` to the next one."""
        order = [p for p in self.partitions if p.unit != "positions"]
        before = [p for p in order if _position(p.unit, self.layers) < boundary]
        after = [p for p in order if _position(p.unit, self.layers) >= boundary]
        read = {name for p in after for name in p.inputs}
        made = [name for p in before for name in p.outputs]
        return tuple(self.values[name] for name in dict.fromkeys(made) if name in read)

    def objects(self, partitions: tuple[PartitionPlan, ...]) -> list[str]:
        """Keys of the object files that these partitions need, each once, the driver first."""
        keys = [self.driver]
        for partition in partitions:
            keys += self.templates[partition.template].objects
        return list(dict.fromkeys(keys))

    def to_json(self) -> str:
        """The plan as sealed JSON text."""
        return json.dumps(seal(FORMAT_VERSION, asdict(self)), indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        """Reads `to_json`'s text; ValueError, saying why, for any other."""
        return msgspec.convert(unseal(FORMAT_VERSION, text), Plan)


def runs_unit(unit: str, layers: range, role: BlockRole) -> bool:
    """Whether a rank with these layers and this role runs a partition of this unit."""
    if unit == "positions":
        return True
    if unit == "prelude":
        return role in (BlockRole.FIRST, BlockRole.SINGLE)
    if unit == "postlude":
        return role in (BlockRole.LAST, BlockRole.SINGLE)
    return int(unit) in layers


def _position(unit: str, layers: int) -> int:
    """Where a unit stands on the axis of layers."""
    if unit == "prelude":
        return -1
    return layers if unit == "postlude" else int(unit)
