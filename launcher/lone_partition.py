"""The `run-partition` command: partitions of a build directory, each alone, on saved values."""

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.manifest import PartitionPlan, Plan, Value
from buddy_pipeline.compile.target import check_runs_here
from buddy_pipeline.launcher.build_config import BuildConfig, load_imported_config
from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.prebuilt import BuiltDirectory
from buddy_pipeline.launcher.settings import PartitionSettings
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.affinity import prepare_threads, threads_for
from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint
from buddy_pipeline.ranks.lone_partition import LonePartition, partition_inputs
from buddy_pipeline.ranks.packing import check_parameters, pack_parameters
from buddy_pipeline.ranks.stage import DRIVER_SYMBOLS
from buddy_pipeline.ranks.world import join_world

#: Tokens of random values where --tokens does not say how many.
_TOKENS = 8
_NUMPY = {"f32": np.dtype(np.float32), "i64": np.dtype(np.int64)}

Values = dict[str, np.ndarray]


def run_partition_command(settings: PartitionSettings) -> int:
    """Runs one partition, or all in order, and writes what they make.

    Raises UserError for a directory that is not compiled or for another CPU, for a partition that
    does not exist, and for values that are missing or do not fit.
    """
    check_writable("--output", settings.output)
    directory = BuildDirectory(settings.build_dir)
    config = load_imported_config(directory)
    check_runs_here(config.target, f"build directory '{directory.root}'")
    checkpoint = open_checkpoint(Path(config.model_path))
    built = BuiltDirectory(directory, config, checkpoint.path)
    partitions = _chosen(built.plan, settings.partition)
    if settings.tokens is not None:
        _check_tokens(settings.tokens, config)  # before there are random values of so many
    values = _given(built.plan, partitions, settings)
    tokens = settings.tokens or len(next(iter(values.values()), range(_TOKENS)))
    _check_tokens(tokens, config)

    world = join_world({})
    team = threads_for(world, settings.threads or config.defaults.threads)
    prepare_threads(world, team)
    made: Values = {}
    for partition in partitions:
        alone = _load(built, checkpoint, partition, tokens, team)
        found = alone.run({**values, **made}, settings.step or tokens)
        print(f"{partition.name}: {counted(tokens, 'token')}")
        for what, described in (("reads", alone.inputs), ("makes", alone.outputs)):
            for value in described.values():
                print(f"  {what} {_described(built.plan, value)}")
        made |= found
    write_atomically(settings.output, _npz(made))
    print(settings.output)
    return 0


def _chosen(plan: Plan, name: str | None) -> Sequence[PartitionPlan]:
    """The partition of this name; all of them for None."""
    if name is None:
        return plan.partitions
    found = [partition for partition in plan.partitions if partition.name == name]
    if not found:
        names = [partition.name for partition in plan.partitions]
        raise UserError(f"partition {name!r} does not exist: {nearest(name, names)}")
    return found


def _check_tokens(tokens: int, config: BuildConfig) -> None:
    """Raises UserError for more tokens than one sequence has positions."""
    if tokens > config.context:
        raise UserError(
            f"{tokens} tokens are more than the model's {counted(config.context, 'position')}:"
            f" give at most {config.context} with --tokens or --inputs"
        )


def _given(plan: Plan, partitions: Sequence[PartitionPlan], settings: PartitionSettings) -> Values:
    """What the partitions read and none of them makes: from files, else random if asked for."""
    saved: Values = {}
    for path in settings.inputs:
        saved |= _read(path)
    needed: dict[str, tuple[Value, str]] = {}
    made: set[str] = set()
    for partition in partitions:
        for name, value in partition_inputs(plan, partition).items():
            if name not in made:
                needed.setdefault(name, (value, partition.name))
        made.update(partition.outputs)
    found: Values = {}
    tokens = settings.tokens
    for name, (value, reader) in needed.items():
        if name in saved:
            found[name] = _checked(plan, value, saved[name], tokens)
            tokens = tokens or len(found[name])
        elif settings.random is None:
            raise UserError(
                f"partition {reader} reads {_described(plan, value)}, which no --inputs file holds:"
                " save it in one, or give --random SEED"
            )
    for name, (value, _) in needed.items():
        if name not in found:
            assert settings.random is not None
            found[name] = _random(plan, value, tokens or _TOKENS, settings.random)
    return found


def _checked(plan: Plan, value: Value, array: np.ndarray, tokens: int | None) -> np.ndarray:
    """A saved value, if it is what is needed for so many tokens."""
    wanted = _shape(plan, value, len(array) if tokens is None and array.ndim else tokens or 0)
    if array.dtype != _NUMPY[value.dtype] or array.shape != wanted or not len(array):
        raise UserError(
            f"--inputs has {value.name} as {array.dtype} {list(array.shape)}, but"
            f" {_described(plan, value)} is needed"
            + (f" for {counted(tokens, 'token')}" if tokens else "")
            + ": save it so"
        )
    if value.name == plan.token_input and not 0 <= array.min() <= array.max() < plan.vocab_size:
        raise UserError(
            f"--inputs has ids from {array.min()} to {array.max()}, but the vocabulary has"
            f" {plan.vocab_size}: give ids from 0 to {plan.vocab_size - 1}"
        )
    return array


def _shape(plan: Plan, value: Value, tokens: int) -> tuple[int, ...]:
    return (tokens,) if value.name == plan.token_input else (tokens, value.elements)


def _described(plan: Plan, value: Value) -> str:
    """A value for people, such as "add_3 (f32 [tokens, 896])"."""
    sizes = ["tokens", *map(str, _shape(plan, value, 0)[1:])]
    return f"{value.name} ({value.dtype} [{', '.join(sizes)}])"


def _random(plan: Plan, value: Value, tokens: int, seed: int) -> np.ndarray:
    """The same numbers for the same seed and name, whatever else is needed."""
    random = np.random.default_rng([seed, zlib.crc32(value.name.encode())])
    shape = _shape(plan, value, tokens)
    if value.name == plan.token_input:
        return random.integers(0, plan.vocab_size, shape, np.int64)
    if value.dtype == "i64":
        return random.integers(0, 2, shape, np.int64)
    return random.standard_normal(shape, np.float32)


def _load(
    built: BuiltDirectory,
    checkpoint: Checkpoint,
    partition: PartitionPlan,
    tokens: int,
    threads: int,
) -> LonePartition:
    plan = built.plan
    parameters = list(dict.fromkeys(partition.parameters))
    objects = built.objects(plan.objects((partition,)))
    library = Library(objects, [*DRIVER_SYMBOLS, plan.templates[partition.template].symbol])
    weights = built.weights(parameters)
    if weights is None:
        check_parameters(parameters, checkpoint)
        weights = pack_parameters(parameters, checkpoint, threads)
    return LonePartition(plan, partition, weights, library, tokens, threads)


def _read(path: Path) -> Values:
    """The arrays of an .npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"--inputs {path} cannot be read ({why}): give an .npz file, as numpy.savez writes"
        ) from None


def _npz(values: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    arrays: dict[str, Any] = dict(values)
    np.savez(buffer, **arrays)
    return buffer.getvalue()
