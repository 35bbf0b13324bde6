"""What is measured, behind one interface; each lives in a process of its own (see `child`).

Nobody samples: the tokens that are fed are given, so that only the models differ in what they do.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchkit.limits import LimitMeter, Limits, Objects
from benchkit.work import Work, count_work
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.launcher.limits import CHUNK
from buddy_pipeline.launcher.loading import StepSizes, open_engine
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.settings import ModelSettings
from buddy_pipeline.partition.errors import UserError

_SLOT = 0
#: Random ids are below this, so that every vocabulary has them.
_IDS = 250


def random_ids(count: int) -> np.ndarray:
    """int64 [count], the same in every run."""
    return np.random.default_rng(0).integers(0, _IDS, count, dtype=np.int64)


@dataclass(frozen=True)
class ModelChoice:
    """A model in a variant, and the longest sequence that will be run."""

    spec: str
    local_model: Path | None
    variant: str | None
    longest: int

    def open(self) -> Model:
        """The model; UserError if its context is too short."""
        settings = ModelSettings(spec=self.spec, variant=self.variant, local_model=self.local_model)
        model = open_model(settings)
        if model.context < self.longest:
            raise UserError(
                f"spec {self.spec}: its context has {model.context} positions, the lengths asked "
                f"for need {self.longest}: ask for shorter ones or raise max_token_len in the spec"
            )
        return model


class Contestant(Protocol):
    """An engine with a model."""

    def prefill(self, ids: np.ndarray) -> float:
        """Seconds to run `ids`, int64 [tokens], from an empty cache to the last token's logits."""

    def decode(self, ids: np.ndarray, context: int) -> float:
        """Seconds to run `ids[context:]`, int64, one by one behind a cache with the others."""

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 [vocab] after the last of `ids`."""


class Ours:
    """This project, through the functions that its command line uses."""

    def __init__(self, choice: ModelChoice, threads: int, cache_dir: Path | None) -> None:
        model = choice.open()
        opened = open_engine(
            model, threads, StepSizes(CHUNK, rows=1, slots=1), Cache.open(cache_dir), show=True
        )
        self._stack = ExitStack()
        self._engine, loaded = self._stack.enter_context(opened)
        self._threads = threads
        self._work = count_work(
            loaded.partitions,
            loaded.stage.kv.position_bytes,
            model.checkpoint.config,
        )
        self._meter: LimitMeter | None = None

    def count_work(self) -> Work:
        """What a step of this model in this variant costs."""
        return self._work

    def prepare_limits(self, objects: Objects, megabytes: int) -> None:
        """Gets ready for `limits`, with the same team of threads."""
        self._meter = LimitMeter(objects, self._threads, megabytes)

    def limits(self, repetitions: int) -> Limits:
        """The machine's limits now."""
        assert self._meter is not None
        return self._meter.measure(repetitions)

    def prefill(self, ids: np.ndarray) -> float:
        started = time.perf_counter()
        self._engine.prefill(_SLOT, ids)
        return time.perf_counter() - started

    def decode(self, ids: np.ndarray, context: int) -> float:
        self._engine.prefill(_SLOT, ids[:context])
        started = time.perf_counter()
        for position, token in enumerate(ids[context:].tolist(), context):
            self._engine.decode(_SLOT, token, position)
        return time.perf_counter() - started

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return self._engine.prefill(_SLOT, ids).copy()
