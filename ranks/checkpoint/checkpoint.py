"""What a model on disk looks like to the rest of the project, whatever its file format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.shown import shown

# Checkpoints saved from a base model lack this prefix, those saved from a causal LM have it.
_BASE_MODEL_PREFIXES = ("model.", "transformer.", "gpt_neox.")

# Buffers that old checkpoints carry beside the parameters: rotary frequencies and causal masks.
_BUFFER_SUFFIXES = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.masked_bias")

# Decoders whose transformers configuration ties the head where config.json does not say.
_TIED_BY_DEFAULT = frozenset(
    [
        "bloom",
        "cohere",
        "cohere2",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "lfm2",
        "mpt",
        "opt",
        "smollm3",
        "starcoder2",
    ]
)

_HEAD = "lm_head.weight"
# What GPT-NeoX calls its head in files; transformers renames it when it loads them.
_GPT_NEOX_HEAD = "embed_out.weight"
# What Mixtral calls its mixture of experts in files; transformers renames it too.
_MLP, _MIXTRAL_MLP = ".mlp.", ".block_sparse_moe."


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's Hugging Face name, its shape in Hugging Face orientation, its type on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TokenizerSource:
    """Where a model's tokenizer, chat template and special tokens come from.

    Exactly one of `json_path` (a `tokenizer.json`) and `gguf` (the `tokenizer.*` metadata of a
    GGUF file, keyed by full key) is set, or neither when a directory has no tokenizer.
    """

    json_path: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None
    chat_template: str | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool | None = None


class StoredTensor(Protocol):
    """One tensor of a file: its description and a way to read rows of it."""

    @property
    def info(self) -> TensorInfo: ...

    @property
    def is_readable(self) -> bool:
        """Whether values of this type can be converted to float32."""
        ...

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Read float32 [stop - start, *shape[1:]], C-contiguous and owned by the caller.

        The range is not empty and within the first dimension.
        """
        ...

    def outputs(self, start: int, stop: int) -> np.ndarray:
        """Read what lies along the last dimension, float32 [stop - start, shape[-1]].

        Of a matrix these are its rows; those of a stack of matrices are counted through.
        """
        ...

    def keeps_outputs(self, transposed: bool) -> bool:
        """Whether `stored_outputs` can be asked for."""
        ...

    def stored_outputs(self, start: int, stop: int) -> np.ndarray:
        """Return outputs in the stored type, uint8 [stop - start, bytes of an output].

        The range is within the outputs of a matrix, or stack of matrices, that keeps them.
        """
        ...


class RecordedTensor(Protocol):
    """A matrix, or stack of matrices, kept as records; see `compile.formats.quantised_rows`."""

    @property
    def form(self) -> str:
        """The name of the row format."""

    def records(self, start: int, stop: int) -> np.ndarray:
        """Read records of outputs, those of a stack counted through, uint8 [stop - start, bytes of
        a record]."""
        ...


@dataclass(frozen=True)
class Quantisation:
    """What a directory that `quantize` wrote says of itself."""

    variant: str
    biased: bool
    """Whether linears with a bias are quantised too."""
    tensors: Mapping[str, RecordedTensor]
    """Those that are quantised."""


class Checkpoint:
    """A model's configuration, tokenizer source and tensors; see `open_checkpoint`.

    Attributes:
        path: the directory or file it was opened from.
        config: the content of a Hugging Face `config.json`.
        tensors: descriptions by Hugging Face name, in file order.
        tokenizer: where the tokenizer comes from.
        quantisation: how matrices were quantised ahead of time, None if none was.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        stored: Mapping[str, StoredTensor],
        tokenizer: TokenizerSource,
        quantisation: Quantisation | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self.quantisation = quantisation
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: tensor.info for name, tensor in stored.items()}
        )
        self._stored = stored

    def find(self, *aliases: str) -> TensorInfo:
        """Return the first tensor that exists, with or without the base model's prefix.

        Raises:
            UserError: none of `aliases` exists; names the first.
        """
        for alias in aliases:
            for name in _spellings(alias):
                if name in self.tensors:
                    return self.tensors[name]
        raise UserError(f"{self.path} has no tensor {aliases[0]}; the model needs it")

    def expect(self, *aliases: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return what `find` does, after checking that it has `shape` and a type that can be read.

        Raises:
            UserError: the tensor is missing, wrongly shaped or wrongly typed.
        """
        info = self.find(*aliases)
        if info.shape != tuple(shape):
            raise UserError(
                f"{self.path}: tensor {shown(info.name)} has shape {list(info.shape)}, but its "
                f"configuration needs {list(shape)}; the two do not belong together"
            )
        self._check_readable(info.name)
        return info

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows `start` to `stop` of a tensor as float32 [stop - start, *shape[1:]].

        Only those rows are touched on disk, temporaries stay in the cache's size, and pages of
        the file are given back afterwards. The result is C-contiguous and owned by the caller.

        Args:
            name: as in `tensors`, or as `find` returned it.

        Raises:
            UserError: no such tensor, or its type cannot be read.
            IndexError: the range is not within the tensor's first dimension.
        """
        info = self._check_readable(name)
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise IndexError(f"rows {start}:{stop} of tensor {name} with shape {list(info.shape)}")
        if start == stop:
            return np.empty((0, *info.shape[1:]), np.float32)
        return self._stored[name].rows(start, stop)

    def read_outputs(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows of a matrix, or of a stack of matrices counted through, as float32
        [stop - start, shape[-1]]; otherwise as `read_rows`, whose errors it raises.
        """
        shape = self._check_readable(name).shape
        if not 0 <= start <= stop <= prod(shape[:-1]):
            raise IndexError(f"outputs {start}:{stop} of tensor {name} with shape {list(shape)}")
        if start == stop:
            return np.empty((0, shape[-1]), np.float32)
        return self._stored[name].outputs(start, stop)

    def keeps_outputs(self, name: str, transposed: bool) -> bool:
        """Whether the file holds the numbers of each output of a matrix, or of each matrix of a
        stack, one after the other.

        transposed: outputs are the columns, as Hugging Face has the matrix.
        """
        info = self._check_readable(name)
        return len(info.shape) in (2, 3) and self._stored[name].keeps_outputs(transposed)

    def stored_outputs(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read a matrix's outputs, or a stack's counted through, in its own type, uint8
        [stop - start, bytes of an output].

        For matrices of which `keeps_outputs` is true, and for whoever computes on a type as it is.
        """
        self._check_readable(name)
        return self._stored[name].stored_outputs(start, stop)

    def has_records(self, name: str, form: str) -> bool:
        """Whether the tensor is kept as records of this row format."""
        if self.quantisation is None or name not in self.quantisation.tensors:
            return False
        return self.quantisation.tensors[name].form == form

    def records(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read records of outputs `start` to `stop`, uint8 [stop - start, bytes of a record].

        Whichever way the tensor is oriented, an output has one record. For tensors of which
        `has_records` is true.
        """
        assert self.quantisation is not None
        return self.quantisation.tensors[name].records(start, stop)

    def read(self, name: str) -> np.ndarray:
        """Read a whole tensor as float32 [*shape]; errors as in `read_rows`."""
        shape = self._check_readable(name).shape
        if not shape:  # a single number is one row
            return self._stored[name].rows(0, 1).reshape(())
        return self.read_rows(name, 0, shape[0])

    def parameters(self) -> list[TensorInfo]:
        """The model's parameters: a tied head is not among them, nor are buffers."""
        return [
            info
            for name, info in self.tensors.items()
            if not name.endswith(_BUFFER_SUFFIXES) and not (name == _HEAD and self.ties_head)
        ]

    def element_count(self) -> int:
        """Count the elements of the model's parameters."""
        return sum(prod(info.shape) for info in self.parameters())

    @property
    def ties_head(self) -> bool:
        """Whether the head multiplies with the embedding matrix."""
        default = self.config.get("model_type") in _TIED_BY_DEFAULT
        return bool(self.config.get("tie_word_embeddings", default))

    def _check_readable(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise UserError(f"{self.path} has no tensor {name}; the model needs it")
        if not self._stored[name].is_readable:
            raise UserError(
                f"{self.path}: tensor {shown(name)} has type {info.dtype}, which cannot be read as "
                "float; use an unquantised checkpoint or a GGUF file"
            )
        return info


def _spellings(name: str) -> list[str]:
    """`name`, then `name` without its base model's prefix or with each possible one, then as
    Mixtral's files have it."""
    if name == _HEAD:
        return [name, _GPT_NEOX_HEAD]
    spellings = [name, *(prefix + name for prefix in _BASE_MODEL_PREFIXES)]
    for prefix in _BASE_MODEL_PREFIXES:
        if name.startswith(prefix):
            spellings = [name, name.removeprefix(prefix)]
    renamed = [s.replace(_MLP, _MIXTRAL_MLP) for s in spellings if _MLP in s]
    return spellings + renamed
