"""The element counts of a spec, `weights_override`, against the model's own.

buddy-mlir counts a model's parameters and its rotary frequencies. In a quantised variant the
elements of quantised linears are `linear_elements` (in int4 two of them are one element) and the
rest, with one scale for each output of a quantised linear, is `other_elements`. What it quantises
can be told from these counts, and is then quantised here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from buddy_pipeline.compile.formats import elements_a_byte
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.launcher.config_numbers import first_number, optional_size
from buddy_pipeline.launcher.module_roles import (
    HEADS,
    POSITION_TABLES,
    ROUTERS,
    TOKEN_TABLES,
    module_of,
)
from buddy_pipeline.launcher.spec import Spec, WeightsOverride
from buddy_pipeline.partition.errors import UserError

if TYPE_CHECKING:
    from buddy_pipeline.ranks.checkpoint import Checkpoint

_WITHOUT_ROTATION = frozenset(
    {"biogpt", "bloom", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "xglm"}
)
"""Values of `model_type` whose models add position embeddings, or slopes to scores, and rotate
nothing."""

_HEAD_SIZES = (
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
)
"""What configurations call the hidden size and the number of heads."""


@dataclass(frozen=True)
class Counts:
    """Elements of a model whose linears are quantised: all of them or those without a bias."""

    biased: bool
    linear: int
    """Stored elements of quantised linears."""
    channels: int
    """Their outputs, each of which has a scale."""
    other: int
    """All other parameters and the rotary frequencies."""

    @property
    def total(self) -> int:
        """As buddy-mlir sums them."""
        return self.linear + self.other + self.channels


def check_float_total(spec: Spec, checkpoint: Checkpoint) -> None:
    """Raises UserError, with both counts, when `total` is not the unquantised model's."""
    assert spec.weights_override is not None
    parameters = checkpoint.element_count()
    rotary = rotary_elements(checkpoint.config)
    if spec.weights_override.total != parameters + rotary:
        raise UserError(
            f"spec {spec.name}: weights_override.total is {spec.weights_override.total:,}, but"
            f" {checkpoint.path} has {parameters + rotary:,} elements ({parameters:,} parameters +"
            f" {rotary:,} rotary frequencies): correct the total or choose another model"
        )


def chosen_counts(spec: Spec, variant: Variant, checkpoint: Checkpoint) -> tuple[Counts, str]:
    """The choice of linears that a spec's counts stand for, and a warning ("" for none).

    variant: the spec's own.

    Raises UserError naming the count that fits neither choice. A total that is not the sum of its
    parts deserves a warning only: buddy-mlir's own w8a16 has one.
    """
    given = spec.weights_override
    assert given is not None
    choices = [model_counts(checkpoint, variant, biased) for biased in (True, False)]
    parts = given.linear_elements or given.i8_elements
    if not parts:
        fitting = [c for c in choices if c.total == given.total]
        if not fitting:
            raise _mismatch(spec, "total", given.total, [c.total for c in choices])
        return fitting[0], ""
    fitting = [c for c in choices if c.linear == parts]
    if not fitting:
        key = "linear_elements" if given.linear_elements else "i8_elements"
        raise _mismatch(spec, key, parts, [c.linear for c in choices])
    counts = fitting[0]
    for key, wanted, own in _parts(given, counts):
        if wanted and wanted != own:
            raise _mismatch(spec, key, wanted, [own])
    if given.total == counts.total:
        return counts, ""
    return counts, (
        f"spec {spec.name}: weights_override.total is {given.total:,}, but its parts are"
        f" {counts.total:,}, which is what the model has; going on with these"
    )


def check_choice(spec: Spec, counts: Counts, variant: Variant, checkpoint: Checkpoint) -> None:
    """Raises UserError when a model that is quantised already has other linears quantised than a
    spec's counts, chosen for its own `variant`, stand for."""
    assert checkpoint.quantisation is not None
    done = model_counts(checkpoint, variant, checkpoint.quantisation.biased)
    if done.linear != counts.linear:
        raise UserError(
            f"spec {spec.name}: weights_override stands for {counts.linear:,} elements in quantised"
            f" linears, but {checkpoint.path} has {done.linear:,}: quantize the original model with"
            " this spec, or leave weights_override out"
        )


def _parts(given: WeightsOverride, counts: Counts) -> list[tuple[str, int, int]]:
    """(key, given, the model's) of every part; scales that are not counted by themselves are among
    the others."""
    other = counts.other + (0 if given.linear_output_channels else counts.channels)
    return [
        ("linear_elements", given.linear_elements, counts.linear),
        ("i8_elements", given.i8_elements, counts.linear),
        ("linear_output_channels", given.linear_output_channels, counts.channels),
        ("other_elements", given.other_elements, other),
        ("f16_elements", given.f16_elements, other),
    ]


def _mismatch(spec: Spec, key: str, given: int, own: list[int]) -> UserError:
    counts = " or ".join(f"{count:,}" for count in dict.fromkeys(own))
    which = " (all linears, or those without a bias)" if len(own) > 1 else ""
    return UserError(
        f"spec {spec.name}: weights_override.{key} is {given:,}, but the model has {counts}{which}:"
        " correct the count or choose another model"
    )


def model_counts(checkpoint: Checkpoint, variant: Variant, biased: bool) -> Counts:
    """What a model has when all its linears are quantised, or with `biased` false only those
    without a bias."""
    shapes = list(_linears(checkpoint, biased))
    elements = sum(prod(shape) for shape, _ in shapes)
    everything = checkpoint.element_count() + rotary_elements(checkpoint.config)
    return Counts(
        biased=biased,
        linear=elements // elements_a_byte(variant.weights),
        channels=sum(outputs for _, outputs in shapes),
        other=everything - elements,
    )


def _linears(checkpoint: Checkpoint, biased: bool) -> list[tuple[tuple[int, ...], int]]:
    """Shape and outputs of every linear's matrix, and of every stack of experts' matrices; a tied
    head is the embedding's, and what chooses experts is never quantised."""
    found: list[tuple[tuple[int, ...], int]] = []
    tied = checkpoint.ties_head
    stacks = [name for name, info in checkpoint.tensors.items() if _is_stack(name, info.shape)]
    routers = {
        f"{name.rpartition('.experts.')[0]}.{role}.weight" for name in stacks for role in ROUTERS
    }
    for name in stacks:
        shape, bias = checkpoint.tensors[name].shape, checkpoint.tensors.get(f"{name}_bias")
        if bias is None or biased:
            found.append((shape, prod(shape[:-1] if bias is None else bias.shape)))
    for name, info in checkpoint.tensors.items():
        if len(info.shape) != 2 or not name.endswith(".weight"):
            continue
        bias = checkpoint.tensors.get(name.removesuffix("weight") + "bias")
        module = module_of(name)
        looked_up = module in POSITION_TABLES or (module in TOKEN_TABLES and not tied)
        if looked_up or (tied and module in HEADS) or (bias is not None and not biased):
            continue
        if name in routers:
            continue
        outputs = info.shape[0] if bias is None else bias.shape[0]
        found.append((info.shape, outputs))
    return found


def _is_stack(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and ".experts." in name


def rotary_elements(config: dict[str, Any]) -> int:
    """The number of rotary frequencies of a model with this Hugging Face config.

    One frequency turns a pair of the rotated elements of a head. 0 where the configuration does not
    say how large a head is.
    """
    if config["model_type"] in _WITHOUT_ROTATION:
        return 0
    rotated = optional_size(config, "rotary_dim")
    if rotated is not None:
        return rotated // 2
    hidden, heads = (first_number(config, keys) for keys in _HEAD_SIZES)
    head_dim = optional_size(config, "head_dim")
    if head_dim is None:
        head_dim = hidden // heads if hidden and heads else 0
    rope = config.get("rope_parameters")
    parts = (part.get("partial_rotary_factor") for part in (config, rope) if isinstance(part, dict))
    share = next((part for part in parts if isinstance(part, int | float) and part), 1.0)
    return int(head_dim * share) // 2
