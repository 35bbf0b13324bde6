"""What the command line asks for, as data, one class a command."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buddy_pipeline.launcher.prompt import PromptSource
    from buddy_pipeline.ranks.sampling import SamplingOptions


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, in which variant, from where."""

    spec: str
    """A shipped spec's name or the path of a JSON file."""
    variant: str | None
    """Overrides the spec's."""
    local_model: Path | None
    """Overrides where the spec's weights come from."""


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
class RunSettings(ModelSettings):
    """`buddy-pipeline run`."""

    threads: int | None
    """Threads a rank; None divides the cores of each host among its ranks."""
    split: tuple[int, ...] | None
    """Layers a rank, rank 0 first; None deals them out as `balance` says."""
    balance: Balance
    cache_dir: Path | None
    """Where compiled objects are kept; None is a folder in the user's cache."""
    prompt: PromptSource
    sampling: SamplingOptions
    top_logits: int
    json_path: Path | None
    profile_out: Path | None
    """Folder for the profile's trace and picture; None writes neither."""
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
    """Whose partitions are written; None is every rank's."""
    world: int
    split: tuple[int, ...] | None
    full_mlir: bool
    weights: bool
    reuse_weights: bool
    direct_weights: bool
    debug_wrappers: bool


@dataclass(frozen=True, kw_only=True)
class VerifySettings(ModelSettings):
    """`buddy-pipeline verify`: the structural check of a split."""

    world: int
    split: tuple[int, ...] | None
    report: Path | None
    """Where the JSON report goes; None is standard output."""


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
