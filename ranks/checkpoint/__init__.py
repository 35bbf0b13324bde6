"""Models on disk, read by tensor name: Hugging Face directories and GGUF files."""

from buddy_pipeline.ranks.checkpoint.checkpoint import Checkpoint, TensorInfo, TokenizerSource
from buddy_pipeline.ranks.checkpoint.opening import has_weights, open_checkpoint, read_config

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "TokenizerSource",
    "has_weights",
    "open_checkpoint",
    "read_config",
]
