"""From a warm cache a rank has its own weights, its KV cache, and little else in memory."""

import math
import os
from pathlib import Path

import pytest

from buddy_pipeline.partition.layers import pipeline_layer_range
from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint
from tests.e2e.command import answer
from tests.jobs import environment
from tests.mpi.job import needs_mpi

WORLD = 4
ALLOWANCE = 250_000_000
"""Bytes beside weights and KV cache: Python, NumPy, LLVM's JIT, MPI, the tokenizer, buffers."""

# Runs before the program on every rank, and after it writes down what the rank has loaded.
SPY = """
import atexit, os, sys

def report():
    with open(os.path.join({folder!r}, os.environ.get("PMI_RANK", "0")), "w") as file:
        print(*sorted({{name.partition(".")[0] for name in sys.modules}}), file=file)

atexit.register(report)
"""


def weight_bytes(checkpoint: Checkpoint, rank: int) -> int:
    """What the tensors of a rank take in f32; SmolLM2's tied head is on both end ranks."""
    layers = pipeline_layer_range(30, rank, WORLD)
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    if rank in (0, WORLD - 1):
        prefixes += ("model.embed_tokens.",)
    if rank == 0:
        prefixes += ("model.norm.",)
    shapes = [info.shape for name, info in checkpoint.tensors.items() if name.startswith(prefixes)]
    return 4 * sum(math.prod(shape) for shape in shapes)


def kv_bytes(rank: int, positions: int) -> int:
    """Keys and values of 3 heads of 64 in f32, for a whole number of blocks of 32 positions."""
    layers = len(pipeline_layer_range(30, rank, WORLD))
    return layers * -(-positions // 32) * 32 * 2 * 3 * 64 * 4


@needs_mpi
@pytest.mark.mpi
def test_a_rank_holds_its_own_part_and_no_compiler(
    smollm2: Path, cache: Path, tmp_path: Path
) -> None:
    ask = ["--spec", "smollm2-135m", "--prompt", "Tell me a story.", "--max-tokens", 40]
    answer(tmp_path / "cold.json", *ask, cache=cache)  # fills the cache, if no other test has

    (tmp_path / "sitecustomize.py").write_text(SPY.format(folder=str(tmp_path)))
    paths = [str(tmp_path), environment()["PYTHONPATH"]]
    warm = answer(
        tmp_path / "warm.json",
        *ask,
        ranks=WORLD,
        cache=cache,
        env={"PYTHONPATH": os.pathsep.join(paths)},
    )
    checkpoint = open_checkpoint(smollm2)
    positions = len(warm["prompt_ids"]) + len(warm["token_ids"])
    for rank, peak in enumerate(warm["stats"]["peak_memory_bytes"]):
        assert peak < weight_bytes(checkpoint, rank) + kv_bytes(rank, positions) + ALLOWANCE
        loaded = set((tmp_path / str(rank)).read_text().split())
        assert "mpi4py" in loaded
        assert loaded & {"torch", "torch_mlir", "mlir", "transformers"} == set()
