"""What a model has around it while it is traced: a cache that keeps nothing, and calls made fit.

Attention owns the real cache. To the model this one says at which position the token is, for
classes that count positions by it, and it refuses what a layer would keep besides keys and values.
"""

from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from buddy_pipeline.partition.errors import UserError


class GraphOfOneToken(TorchFunctionMode):
    """Calls that a graph of one token cannot hold as they are.

    `arange` from a position that is a tensor, one token far, is that position. A number made a
    tensor on the meta device would lose its value, which `full` keeps; so would the one index of a
    list, which is a slice.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.arange and len(args) > 1 and isinstance(args[0], torch.Tensor):
            return args[0].reshape(1)
        if function is torch.tensor and isinstance(args[0], (int, float)):
            return torch.full((), args[0], **(kwargs or {}))
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(map(_as_slice, args[1])))
        return function(*args, **(kwargs or {}))


def _as_slice(index: Any) -> Any:
    if isinstance(index, list) and len(index) == 1 and isinstance(index[0], int):
        return slice(index[0], index[0] + 1 or None)
    return index


class TracingCache(Cache):
    """One token's keys and values go through unchanged.

    position: what `get_seq_length` says, 0 for models that are given positions anyway.
    """

    def __init__(self, position: torch.Tensor | int) -> None:
        super().__init__(layers=[])
        self._position: Any = position

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the token itself."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens before this one."""
        return self._position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Masks are the kernel's: to the model there is the token itself."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As `get_mask_sizes`."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, *_: Any) -> NoReturn:
        """Only layers with a state of their own ask."""
        self._refuse(layer_idx, "a state that it carries from token to token")

    def get_conv_state(self, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        """A convolution over tokens wants those before."""
        self._refuse(layer_idx, "a convolution over tokens")

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> NoReturn:
        """As `get_conv_state`."""
        self._refuse(layer_idx, "a convolution over tokens")

    def get_recurrent_state(self, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        """Linear attention and state spaces."""
        self._refuse(layer_idx, "a recurrent state")

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> NoReturn:
        """As `get_recurrent_state`."""
        self._refuse(layer_idx, "a recurrent state")

    def update_indexer(self, states: torch.Tensor, layer_idx: int) -> NoReturn:
        """Sparse attention whose keys are chosen by keys of another kind."""
        self._refuse(layer_idx, "an indexer that chooses the keys it attends to")

    def _refuse(self, layer: int | None, what: str) -> NoReturn:
        raise UserError(f"layer {layer} has {what}, which has no kernel yet")
