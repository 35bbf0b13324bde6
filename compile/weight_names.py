"""What files call a model's parameters: transformers renames some while it loads them."""

from collections.abc import Callable
from typing import Any


def names_in_files(model: Any) -> Callable[[str], str]:
    """A function from a parameter's name in the model to its name in a checkpoint.

    Where loading does more than rename (it stacks experts, say) the name stays as it is.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            PrefixChange,
            WeightConverter,
            WeightRenaming,
            apply_converters,
            apply_renamings,
        )
    except ImportError:
        return lambda name: name  # a version whose parameters are named as in files
    # What transformers does when it saves: each step backwards, the last first.
    steps = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    back = [step.reverse_transform() for step in steps if not isinstance(step, PrefixChange)]
    renamings = [step for step in back if isinstance(step, WeightRenaming)]
    converters = [step for step in back if isinstance(step, WeightConverter)]

    def name_in_file(name: str) -> str:
        _, converted = apply_converters(name, converters)
        return name if converted is not None else str(apply_renamings(name, renamings))

    return name_in_file
