"""Finding the splitter of a strategy's name, for a model family."""

import importlib
import importlib.util

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.strategies import block, coarse, fine
from buddy_pipeline.partition.strategies.pieces import Splitter

STRATEGIES: dict[str, Splitter] = {
    "coarse": coarse.split,
    "block": block.split,
    "fine": fine.split,
}


def layer_splitter(strategy: str, family: str) -> Splitter:
    """The splitter for models whose config.json says `model_type: family`.

    A module `partition/strategies/<family>.py` may hold functions named like strategies, which
    take the place of the general ones. UserError for a strategy that does not exist.
    """
    if strategy not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise UserError(f"split strategy {strategy!r} does not exist: use one of {known}")
    name = family.replace("-", "_")
    if name.isidentifier() and name not in _OTHERS:
        full = f"{__package__}.{name}"
        if importlib.util.find_spec(full) is not None:
            own: Splitter | None = getattr(importlib.import_module(full), strategy, None)
            if own is not None:
                return own
    return STRATEGIES[strategy]


#: Modules of this package that are no model family.
_OTHERS = frozenset({*STRATEGIES, "pieces", "choosing"})
