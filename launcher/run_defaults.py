"""What a spec says on how its model is run; a build directory keeps it, options override it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buddy_pipeline.launcher.json_fields import check_keys, read_object
from buddy_pipeline.partition.errors import UserError
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


def read_defaults(value: Any, context: int) -> RunDefaults:
    """The defaults of JSON data, as `asdict` gives them; tiers are rounded as a spec's are.

    Raises UserError, naming it, for a key that is missing or unknown or a value that cannot be.
    """
    data = read_object(value, "run")
    names = ("threads", "prefill_chunk", "kv_tiers")
    try:
        check_keys(data, frozenset(names))
        for name in names:
            if name not in data:
                raise UserError(f"{name} is missing")
        for name in ("threads", "prefill_chunk"):
            if data[name] is not None:
                _check_count(name, data[name])
        tiers = data["kv_tiers"]
        if not isinstance(tiers, list | tuple):
            raise UserError(f"kv_tiers is {tiers!r}: it must be a list of positions")
        for tier in tiers:
            _check_count("kv_tiers", tier)
    except UserError as error:
        raise UserError(f"run: {error}") from None
    return RunDefaults(data["threads"], data["prefill_chunk"], kv_tiers(context, tuple(tiers)))


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} has {value!r}: it must be a whole number of 1 or more")
