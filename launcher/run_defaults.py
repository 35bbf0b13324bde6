"""What a spec says on how its model is run; a build directory keeps it, options override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buddy_pipeline.ranks.slots import kv_tiers

if TYPE_CHECKING:
    from buddy_pipeline.launcher.spec import Spec


@dataclass(frozen=True)
class RunDefaults:
    """How the ranks run a model where no option says otherwise."""

    threads: int | None
    """Threads a rank; None divides the cores of the host among its ranks."""
    prefill_chunk: int | None
    """Most prompt tokens in a step; None suits them to the ranks and to what else runs."""
    kv_tiers: tuple[int, ...]
    """Positions that a sequence's KV memory grows through, ascending; the last holds the
    context."""


def spec_defaults(spec: Spec, context: int) -> RunDefaults:
    """A spec's defaults for sequences of `context` positions."""
    return RunDefaults(spec.num_threads, spec.prefill_tokens, kv_tiers(context, spec.kv_tiers))


def read_defaults(data: Mapping[str, Any], context: int) -> RunDefaults:
    """The defaults of JSON data, as `asdict` gives them; tiers are rounded as a spec's are.

    Raises KeyError for one that is missing, and ValueError, naming it, for a value that cannot be.
    """
    counts = {name: data[name] for name in ("threads", "prefill_chunk")}
    for name, value in counts.items():
        if value is not None:
            _check_count(name, value)
    if not isinstance(data["kv_tiers"], list | tuple):
        raise ValueError(f"kv_tiers is {data['kv_tiers']!r}: it must be a list of positions")
    for value in data["kv_tiers"]:
        _check_count("kv_tiers", value)
    return RunDefaults(**counts, kv_tiers=kv_tiers(context, tuple(data["kv_tiers"])))


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} has {value!r}: it must be a whole number of 1 or more")
