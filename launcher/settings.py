"""What the command line asks for, as data, one class a command."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.kinds import check_kind

if TYPE_CHECKING:
    from buddy_pipeline.launcher.prompt import PromptSource
    from buddy_pipeline.ranks.sampling import SamplingOptions


MAX_SEQUENCES = 16
"""Sequences that run at once where there may be many."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, in which variant, from where."""

    spec: str
    """A shipped spec's name or the path of a JSON file."""
    variant: str | None = None
    """Overrides the spec's."""
    kv_cache_dtype: str | None = None
    """Overrides the spec's and the variant's."""
    local_model: Path | None = None
    """Overrides where the spec's weights come from."""
    exact: bool = False
    """Keeps activations in f32 where the variant would quantise them."""


MOST_AT_ONCE = 65_536
"""The most sequences, microbatches and prompt tokens in a step: more than a host keeps up with."""

_COUNTS = {  # with the most that each may be
    "threads": None,
    "max_sequences": MOST_AT_ONCE,
    "microbatches": MOST_AT_ONCE,
    "prefill_chunk": MOST_AT_ONCE,
    "kv_memory_bytes": None,
}


class Balance(Enum):
    """How layers are dealt out to ranks."""

    EVEN = "even"
    """The same number to each, up to one."""
    MEMORY = "memory"
    """So that the largest rank is smallest, with embedding, head and KV cache."""
    MEASURED = "measured"
    """So that the slowest rank is fastest, by timing every block on its rank."""


class PlanBalance(Enum):
    """How `plan` deals layers out."""

    EVEN = "even"
    MEMORY = "memory"
    SPEED = "speed"
    """So that the slowest rank is fastest, by the cost model."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(ModelSettings):
    """How the ranks run the model."""

    threads: int | None = None
    """Threads a rank; None divides the cores of each host among its ranks."""
    split: tuple[int, ...] | None = None
    """Layers a rank, rank 0 first; None deals them out as `balance` says."""
    balance: Balance = Balance.EVEN
    cache_dir: Path | None = None
    """Where compiled objects are kept; None is a folder in the user's cache."""
    build_dir: Path | None = None
    """A build directory to run, in place of a spec."""
    bundle: Path | None = None
    """A rank's bundle, or a folder of them, to run, in place of a spec."""
    max_sequences: int = 1
    """Sequences that run at once; others wait."""
    microbatches: int | None = None
    """Parts that the running sequences are dealt out to; None suits them to the stages' times."""
    prefill_chunk: int | None = None
    """Most prompt tokens in a step; None suits them to the ranks and to what else runs."""
    kv_memory_bytes: int | None = None
    """What the KV cache may take on each rank; None is most of what is free."""
    step_timeout_s: float | None = None
    """How long a rank may take for a step; None for ever."""
    profile_out: Path | None = None
    """Folder for the profile's trace and picture; None writes neither."""

    def __post_init__(self) -> None:
        """Raises UserError for a number that cannot be, as the command line's own parsers do."""
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            if value is not None:
                check_kind(name, value, int)
                if value < 1 or (most is not None and value > most):
                    rule = "1 or more" if most is None else f"from 1 to {most:,}"
                    raise UserError(f"{name} is {value}: it must be {rule}")
        if self.step_timeout_s is not None:
            check_kind("step_timeout_s", self.step_timeout_s, float)
            if not 0 < self.step_timeout_s < math.inf:
                raise UserError(
                    f"step_timeout_s is {self.step_timeout_s}: it must be a finite number above 0"
                )


@dataclass(frozen=True, kw_only=True)
class RunSettings(PipelineSettings):
    """`buddy-pipeline run`."""

    prompt: PromptSource
    sampling: SamplingOptions
    top_logits: int
    json_path: Path | None
    stats: bool


@dataclass(frozen=True, kw_only=True)
class BatchSettings(PipelineSettings):
    """`buddy-pipeline batch`."""

    input: Path
    """JSON lines, see `batch_lines`."""
    output: Path
    """Where results go, one a line, in the order in which they are finished."""
    stats: bool


@dataclass(frozen=True, kw_only=True)
class CompileSettings(ModelSettings):
    """`buddy-pipeline compile`: the objects of one rank."""

    rank: int
    world: int
    split: tuple[int, ...] | None
    jobs: int | None
    """Compiler processes at a time; None is one a core."""
    target_cpu: str | None
    """LLVM's name of the CPU to compile for; None is this machine's."""
    cache_dir: Path | None


@dataclass(frozen=True, kw_only=True)
class BuildSettings(ModelSettings):
    """`buddy-pipeline gen-config`: how a model is cut and for what it is compiled."""

    strategy: str
    """The split strategy's name."""
    whole_graph: bool
    """One module without templates, for comparison."""
    target_triple: str | None
    target_cpu: str | None
    target_features: str | None
    """LLVM's names; None is this machine's."""


@dataclass(frozen=True)
class StageSettings:
    """What every stage on a build directory takes."""

    build_dir: Path | None
    """None is the folder of the configuration."""
    cache_dir: Path | None
    jobs: int | None


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """`buddy-pipeline import`."""

    rank: int | None
    """Whose partitions are written; None is every rank's, under `mpirun` all ranks together."""
    world: int | None
    """None is as many as `mpirun` started."""
    split: tuple[int, ...] | None
    full_mlir: bool
    weights: bool
    reuse_weights: bool
    direct_weights: bool
    debug_wrappers: bool


@dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    """`buddy-pipeline run-partition`: partitions of a build directory, each alone."""

    build_dir: Path
    partition: str | None
    """Its name; None is all of them in order."""
    inputs: tuple[Path, ...]
    """Files of saved values."""
    random: int | None
    """The seed of values that no file holds; None asks for all of them in files."""
    tokens: int | None
    """None is as many as the files have."""
    step: int | None
    """Tokens at a time; None is all."""
    threads: int | None
    output: Path


@dataclass(frozen=True, kw_only=True)
class VerifySettings(ModelSettings):
    """`buddy-pipeline verify`: the structural check of a split, and a numeric one."""

    build_dir: Path | None
    """What is verified in place of a spec; then the next three are the directory's."""
    world: int
    split: tuple[int, ...] | None
    strategy: str
    """How layers are cut."""
    numeric: tuple[str, ...]
    """Prompts to compare logits on; none leaves that out."""
    report: Path | None
    """Where the JSON report goes; None is standard output."""
    cache_dir: Path | None


@dataclass(frozen=True, kw_only=True)
class PlanSettings(ModelSettings):
    """`buddy-pipeline plan`: a split, and what it needs and does, without running it."""

    world: int
    hosts: Path | None
    """What the hosts can do; None supposes hosts like this one."""
    split: tuple[int, ...] | None
    balance: PlanBalance
    sequences: int
    """Sequences at once."""


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings(ModelSettings):
    """`buddy-pipeline quantize`."""

    output: Path
    """The folder to write."""
    cache_dir: Path | None = None
    """Where the model's plan is kept; None is a folder in the user's cache."""
