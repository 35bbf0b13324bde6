"""What was built before a run: a build directory or a bundle; nothing is compiled or packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from buddy_pipeline.compile.build_directory import BuildDirectory, directory_for
from buddy_pipeline.compile.compiled_files import read_objects
from buddy_pipeline.compile.manifest import Parameter, Plan
from buddy_pipeline.compile.target import Target, check_runs_here, host_target
from buddy_pipeline.launcher.build_config import BuildConfig, load_imported_config
from buddy_pipeline.launcher.model import Model
from buddy_pipeline.launcher.settings import Balance, PipelineSettings
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.mapped_weights import map_weights

if TYPE_CHECKING:
    import numpy as np

    from buddy_pipeline.compile.cache import Cache
    from buddy_pipeline.ranks.checkpoint import Checkpoint


class Prebuilt(Protocol):
    """Where a rank's plan, code and packed weights come from."""

    @property
    def plan(self) -> Plan:
        """The model's plan."""

    def objects(self, keys: Sequence[str]) -> list[bytes]:
        """Object files; UserError if one is not there or not as it was built."""

    def weights(self, parameters: Sequence[Parameter]) -> Mapping[Parameter, np.ndarray] | None:
        """Packed weights, mapped; None where they have to be packed from the checkpoint."""


class BuiltDirectory:
    """A compiled build directory, with weights that count while their source is what it was."""

    def __init__(self, directory: BuildDirectory, config: BuildConfig, source: Path) -> None:
        self.plan = directory.read_plan()
        self._directory = directory
        self._manifest = directory.read_manifest()
        self._source = (source, config.variant)

    def objects(self, keys: Sequence[str]) -> list[bytes]:
        """See `Prebuilt`."""
        found = read_objects(self._directory, self._manifest, keys)
        return [found[key] for key in keys]

    def weights(self, parameters: Sequence[Parameter]) -> Mapping[Parameter, np.ndarray] | None:
        """See `Prebuilt`."""
        return map_weights(self._directory.weights, parameters, self._source)


def open_prebuilt(settings: PipelineSettings, rank: int, world: int, cache: Cache) -> Model:
    """The model of `--build-dir` or `--bundle`.

    Raises UserError for what was not built, for another CPU, or for another world.
    """
    if settings.bundle is not None:
        return _open_bundle(settings, rank, world, cache)
    assert settings.build_dir is not None
    directory = directory_for(settings.build_dir, host_target())
    model = open_directory(directory, settings.local_model)
    if settings.split is not None or settings.balance is not Balance.EVEN:
        return replace(model, split=settings.split)
    manifest = directory.read_manifest()
    return replace(model, split=manifest.split) if manifest.world == world else model


def open_directory(directory: BuildDirectory, local_model: Path | None) -> Model:
    """The model of a compiled build directory; UserError for what was not built, or for another
    CPU."""
    config = load_imported_config(directory)
    check_runs_here(config.target, f"build directory '{directory.root}'")
    checkpoint = open_checkpoint(local_model or Path(config.model_path))
    return _built_model(config, checkpoint, BuiltDirectory(directory, config, checkpoint.path))


def _open_bundle(settings: PipelineSettings, rank: int, world: int, cache: Cache) -> Model:
    from buddy_pipeline.launcher.bundle import Bundle, bundle_name

    assert settings.bundle is not None
    path = settings.bundle
    bundle = Bundle(path / bundle_name(rank, world) if path.is_dir() else path)
    if (bundle.rank, bundle.world) != (rank, world):
        raise UserError(
            f"bundle {bundle.path} is for rank {bundle.rank} of {bundle.world}, but this is rank"
            f" {rank} of {world}: give the folder of bundles that were packed for this world"
        )
    check_runs_here(Target(**bundle.plan.target), f"bundle {bundle.path}")
    inside = bundle.checkpoint(cache)
    if inside is None and settings.local_model is None:
        raise UserError(
            f"bundle {bundle.path} has no weights in it: give --local-model, or pack it with them"
        )
    checkpoint = inside if settings.local_model is None else open_checkpoint(settings.local_model)
    assert checkpoint is not None
    return _built_model(bundle.config, checkpoint, bundle, bundle.split)


def _built_model(
    config: BuildConfig,
    checkpoint: Checkpoint,
    prebuilt: Prebuilt,
    split: tuple[int, ...] | None = None,
) -> Model:
    return Model(
        checkpoint=checkpoint,
        formats=config.formats,
        context=config.context,
        layers=config.layers,
        defaults=config.defaults,
        granularity=config.granularity,
        prebuilt=prebuilt,
        split=split,
    )
