"""The peers: transformers and llama.cpp on the weights that our checkpoint reader gives."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchkit.contestants import ModelChoice
from benchkit.gguf_export import QUANTISATIONS
from buddy_pipeline.partition.errors import UserError

TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
#: llama.cpp's format that is no format: the model's own GGUF file, as it is.
OWN_FILE = "own"
_TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16"}
#: Tokens that llama.cpp computes at a time, its default.
_LLAMA_BATCH = 512


@dataclass(frozen=True)
class Peer:
    """A peer and the number format it uses, written `transformers:bf16`, `llama.cpp:Q8_0`."""

    engine: str
    format: str

    @property
    def name(self) -> str:
        return f"{self.engine}:{self.format}"


def parse_peers(text: str) -> list[Peer]:
    """The peers of --peers; UserError for an unknown one and for one that is not installed."""
    peers = []
    for name in text.split(","):
        engine, _, form = name.strip().partition(":")
        formats = _FORMATS.get(engine)
        if formats is None or form not in formats:
            known = [f"{e}:{f}" for e, formats in _FORMATS.items() for f in formats]
            raise UserError(f"--peers {name!r} is not known: use any of {', '.join(known)}")
        module, package = _MODULES[engine]
        if importlib.util.find_spec(module) is None:
            raise UserError(f"--peers {name} needs the package {package}: pip install {package}")
        peers.append(Peer(engine, form))
    return peers


_FORMATS = {TRANSFORMERS: tuple(_TORCH_TYPES), LLAMA_CPP: (*QUANTISATIONS, OWN_FILE)}
_MODULES = {
    TRANSFORMERS: ("transformers", "transformers"),
    LLAMA_CPP: ("llama_cpp", "llama-cpp-python"),
}


class Transformers:
    """The stock class with PyTorch's fused attention and its dynamic cache."""

    def __init__(self, choice: ModelChoice, form: str, threads: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        dtype = getattr(torch, _TORCH_TYPES[form])
        checkpoint = choice.open().checkpoint
        fields = {k: v for k, v in checkpoint.config.items() if k not in _NO_CONFIG_FIELDS}
        config = AutoConfig.for_model(checkpoint.config["model_type"], **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        weights = {}
        for name, _ in model.named_parameters():  # names a tied head once
            info = checkpoint.expect(name, shape=tuple(model.get_parameter(name).shape))
            weights[name] = torch.from_numpy(checkpoint.read(info.name)).to(dtype)
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        _materialise_buffers(model, config)
        self._model = model.eval()
        # transformers 5.40 renames the argument.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def prefill(self, ids: np.ndarray) -> float:
        started = time.perf_counter()
        self._run(ids, self._cache())
        return time.perf_counter() - started

    def decode(self, ids: np.ndarray, context: int) -> float:
        cache = self._cache()
        self._run(ids[:context], cache)
        started = time.perf_counter()
        for token in ids[context:]:
            self._run(token[None], cache)
        return time.perf_counter() - started

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return self._run(ids, self._cache())

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache()

    def _run(self, ids: np.ndarray, cache: Any) -> np.ndarray:
        """float32 [vocab]: the logits after the last of `ids`."""
        with self._torch.inference_mode():
            answer = self._model(
                self._torch.from_numpy(ids)[None],
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: cache},
            )
        result: np.ndarray = answer.logits[0, -1].float().numpy()
        return result


_NO_CONFIG_FIELDS = frozenset({"model_type", "architectures", "torch_dtype", "dtype"})


def _materialise_buffers(model: Any, config: Any) -> None:
    """Rotary frequencies are not in a checkpoint: they are made anew, off the meta device."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, type(module)(config))


class LlamaCpp:
    """llama.cpp through its C interface: no sampler, and nothing of an earlier prompt is kept."""

    def __init__(self, path: Path, threads: int, longest: int, repack: bool = True) -> None:
        """`repack` allows kernels that want weights in a layout of their own, AMX among them."""
        import llama_cpp

        self._lib = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = repack
        self._model = llama_cpp.llama_load_model_from_file(str(path).encode(), loading)
        if not self._model:
            raise UserError(f"llama.cpp cannot load {path}")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = longest
        parameters.n_batch = parameters.n_ubatch = _LLAMA_BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise UserError(f"llama.cpp cannot make a context of {longest} tokens for {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def prefill(self, ids: np.ndarray) -> float:
        self._forget()
        started = time.perf_counter()
        self._run(ids)
        return time.perf_counter() - started

    def decode(self, ids: np.ndarray, context: int) -> float:
        self._forget()
        self._run(ids[:context])
        started = time.perf_counter()
        for token in ids[context:]:
            self._run(token[None])
        return time.perf_counter() - started

    def logits(self, ids: np.ndarray) -> np.ndarray:
        self._forget()
        self._run(ids)
        memory = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(memory, (self._vocab,)).copy()

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _run(self, ids: np.ndarray) -> None:
        """Runs `ids` behind what the cache holds; logits after the last are ready on return."""
        tokens = ids.astype(np.int32)
        for start in range(0, len(tokens), _LLAMA_BATCH):
            part = tokens[start : start + _LLAMA_BATCH]
            pointer = part.ctypes.data_as(ctypes.POINTER(self._lib.llama_token))
            batch = self._lib.llama_batch_get_one(pointer, len(part))
            status = self._lib.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
        self._lib.llama_get_logits_ith(self._context, -1)  # waits for what is under way
