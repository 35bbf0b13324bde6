"""Stages of tiny models against transformers; the same bits whatever the chunks, the company, the
team and the split."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role, layer_ranges
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.messages import Kind, StepBuffer
from buddy_pipeline.ranks.packing import check_parameters, pack_parameters
from buddy_pipeline.ranks.stage import Stage, StageSizes, needed_partitions
from tests.checkpoints import FAMILIES, VOCAB_SIZE, reference_logits
from tests.compile.models import library, plan, planned
from tests.ranks.made_stage import MadeStage

Write = Callable[..., Path]
PROMPT = np.random.default_rng(3).integers(0, VOCAB_SIZE, 40)
SIZES = StageSizes(tokens=64, rows=64, slots=3, context=128, threads=1)


class Chain:
    """All ranks of a pipeline in one process: payloads go from stage to stage as messages do."""

    def __init__(
        self,
        path: Path,
        family: str,
        world: int = 1,
        split: Sequence[int] | None = None,
        threads: int = 1,
        variant: str = "f32",
    ) -> None:
        made, _ = planned(family, variant)
        checkpoint = open_checkpoint(path)
        sizes = StageSizes(SIZES.tokens, SIZES.rows, SIZES.slots, SIZES.context, threads)
        self.stages: list[Stage] = []
        for rank, layers in enumerate(layer_ranges(made.layers, world, split)):
            role = block_role(rank, world)
            partitions = needed_partitions(made, layers, role)
            parameters = [p for partition in partitions for p in partition.parameters]
            check_parameters(parameters, checkpoint)
            weights = pack_parameters(parameters, checkpoint, 1)
            code = library(family, variant) if partitions else None
            stage = Stage(made, layers, role, weights, code, sizes)
            stage.kv.apply([(slot, sizes.context, slot, 0) for slot in range(sizes.slots)])
            self.stages.append(stage)
        self._buffers = [StepBuffer(64, 64, s.input_bytes) for s in self.stages]

    def run(
        self,
        ids: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray | range,
        slots: Sequence[int] | None = None,
        rows: Sequence[int] | range | None = None,
    ) -> np.ndarray:
        """One step through all stages; the logits of `rows` (default: of every token)."""
        wanted = range(len(ids)) if rows is None else rows
        for rank in reversed(range(len(self.stages))):
            stage, buffer = self.stages[rank], self._buffers[rank]
            step = buffer.begin(Kind.STEP, 0, len(ids), len(wanted))
            step.ids[:], step.positions[:], step.rows[:] = ids, positions, wanted
            step.slots[:] = 0 if slots is None else slots
            below = self._buffers[rank - 1] if rank else None
            out = 0
            if below is not None:
                out = below.begin(Kind.STEP, 0, len(ids), len(wanted)).payload_address
            if stage.is_empty:
                assert below is not None
                below.memory[:] = buffer.memory
            else:
                stage.run(step, step.payload_address, out)
        return self.stages[0].logits(len(wanted)).copy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(checkpoint: Write, family: str) -> None:
    path = checkpoint(family)
    reference = reference_logits(path, PROMPT, 3)
    chain = Chain(path, family)
    got = chain.run(PROMPT, range(40))
    size = np.abs(reference.prompt).max()
    assert np.abs(got - reference.prompt).max() < 1e-5 * size
    for t, token in enumerate(reference.tokens):
        got = chain.run([token], [40 + t])
        assert np.abs(got - reference.steps[t]).max() < 1e-5 * size
    assert (got[0].argmax() == reference.steps[-1].argmax()).all()


@pytest.mark.parametrize(
    ("family", "variant", "tolerance"), [("llama", "bf16", 0.08), ("gpt2", "f16", 0.01)]
)
def test_variants_of_16_bits_are_near(
    checkpoint: Write, family: str, variant: str, tolerance: float
) -> None:
    path = checkpoint(family)
    exact = Chain(path, family).run(PROMPT, range(40))
    near = Chain(path, family, variant=variant).run(PROMPT, range(40))
    error = np.linalg.norm(near - exact) / np.linalg.norm(exact)
    assert 0 < error < tolerance


@pytest.mark.parametrize(
    ("family", "variant"),
    [("llama", "f32"), ("llama", "bf16"), ("gpt2", "f16"), ("gemma2", "f32")],
)
def test_no_bit_depends_on_chunks_company_team_or_split(
    checkpoint: Write, family: str, variant: str
) -> None:
    path = checkpoint(family)
    whole = Chain(path, family, variant=variant).run(PROMPT, range(40))
    for world, split, threads in [
        (1, None, 2),
        (2, None, 1),
        (3, None, 2),
        (3, [1, 0, 2], 1),
        (4, [0, 2, 1, 0], 1),
    ]:
        chain = Chain(path, family, world, split, threads, variant)
        parts, start = [], 0
        for size in (1, 17, 2, 20):
            parts.append(chain.run(PROMPT[start : start + size], range(start, start + size)))
            start += size
        assert (np.concatenate(parts) == whole).all()
    # Three sequences at once, each a few tokens ahead of the next.
    chain = Chain(path, family, variant=variant)
    got = np.zeros((3, 40, VOCAB_SIZE), np.float32)
    for first in range(-8, 40, 4):
        tokens = [(s, t) for s in range(3) for t in range(first + 4 * s, first + 4 * s + 4)]
        tokens = [(s, t) for s, t in tokens if 0 <= t < 40]
        if tokens:
            slots, places = [s for s, _ in tokens], [t for _, t in tokens]
            for (s, t), row in zip(tokens, chain.run(PROMPT[places], places, slots), strict=True):
                got[s, t] = row
    assert (got == whole).all()


def test_only_the_rows_that_are_asked_for_are_computed(checkpoint: Write) -> None:
    chain = Chain(checkpoint("qwen2"), "qwen2")
    whole = chain.run(PROMPT, range(40))
    some = chain.run(PROMPT, range(40), rows=[39, 0, 17])
    assert (some == whole[[39, 0, 17]]).all()
    none = chain.run(PROMPT, range(40), rows=[])
    assert none.shape == (0, VOCAB_SIZE)


def test_a_sequence_of_nan_leaves_its_neighbours_alone(checkpoint: Write) -> None:
    chain = Chain(checkpoint("llama"), "llama")
    clean = chain.run([*PROMPT[:9]] * 2, [*range(9)] * 2, [0] * 9 + [1] * 9)
    # Slot 1 of the cache is overwritten with NaN before its next token.
    chain.stages[0].kv._memory[1].view(np.float32)[:] = np.nan
    got = chain.run([5, 5], [9, 9], [0, 1])
    assert np.isfinite(got[0]).all() and np.isnan(got[1]).all()
    again = chain.run([*PROMPT[:9]] * 2, [*range(9)] * 2, [0] * 9 + [1] * 9)
    assert (again == clean).all()


def test_payloads_are_the_rows_that_cross(checkpoint: Write) -> None:
    stages = Chain(checkpoint("llama"), "llama", world=4).stages
    (hidden,) = plan("llama").crossing(1)
    assert [s.input_bytes for s in stages] == [hidden.row_bytes] * 3 + [0]
    assert [s.output_bytes for s in stages] == [0] + [hidden.row_bytes] * 3
    assert [s.vocab_size for s in stages] == [VOCAB_SIZE, 0, 0, 0]


def test_a_rank_loads_its_own_weights_only(checkpoint: Write) -> None:
    """Of an untied model: each matrix on one rank, and the position tables weigh nothing."""
    made = plan("mistral")
    loaded: list[str] = []
    for rank, layers in enumerate(layer_ranges(made.layers, 3)):
        for partition in needed_partitions(made, layers, block_role(rank, 3)):
            loaded += [w for p in partition.parameters for part in p.parts for w in part.weight]
    assert sorted(loaded) == sorted(made.parameters)


def test_a_rank_without_layers_in_the_middle_needs_nothing() -> None:
    made = plan("llama")
    assert needed_partitions(made, range(1, 1), block_role(1, 3)) == ()
    assert needed_partitions(made, range(0, 0), block_role(2, 3)) != ()


def test_a_context_that_is_too_large_for_the_machine_is_refused() -> None:
    with pytest.raises(UserError, match=r"2,147,483,648 positions needs .* smaller max_token_len"):
        MadeStage(1, [], 1, context=1 << 31, partial=1 << 30)
