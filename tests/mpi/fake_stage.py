"""A stage in NumPy with everything a real one has that the pipeline can get wrong.

Each layer mixes a token with the tokens before it in its slot, so that a step that is lost,
repeated, or out of order changes the logits; and works on one token at a time, so that the logits
are bit-identical whatever the chunks and the world.
"""

import ctypes

import numpy as np

from buddy_pipeline.partition.layers import pipeline_layer_range
from buddy_pipeline.ranks.engine import Engine, LastStage
from buddy_pipeline.ranks.messages import Bounds, Step
from buddy_pipeline.ranks.scheduler import Limits, Scheduler
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.slots import MOST_CHANGES, Slots, kv_tiers
from buddy_pipeline.ranks.transport import Loopback, Transport

HIDDEN = 16
LAYERS = 3
MAX_TOKENS = 8
MAX_ROWS = 4
BOUNDS = Bounds(context=96, slots=8, vocab=23)
IN_FLIGHT = 4
MAX_CHANGES = MOST_CHANGES * BOUNDS.slots
TOKEN_BYTES = HIDDEN * 4


class FakeStage:
    """The stage of one rank: layers `pipeline_layer_range(LAYERS, rank, world)`."""

    def __init__(self, rank: int, world: int) -> None:
        self.embeds = rank == world - 1
        self.has_head = rank == 0
        self.layers = pipeline_layer_range(LAYERS, rank, world)
        self.input_bytes = 0 if self.embeds else TOKEN_BYTES
        self.output_bytes = 0 if self.has_head else TOKEN_BYTES
        self.is_empty = not self.layers and not self.embeds and not self.has_head
        self.vocab_size = BOUNDS.vocab if self.has_head else 0
        self.steps: list[int] = []
        """Tokens of each step."""
        self.capacities = np.zeros(BOUNDS.slots, dtype=np.int64)
        self._cache = np.zeros((LAYERS, BOUNDS.slots, BOUNDS.context, HIDDEN), dtype=np.float32)
        self._logits = np.zeros((MAX_ROWS, BOUNDS.vocab), dtype=np.float32)

    def run(self, step: Step, inputs: int, outputs: int) -> None:
        assert not self.is_empty
        self.steps.append(step.tokens)
        for slot, capacity, source, positions in step.changes.tolist():
            kept = self._cache[:, source, :positions].copy()
            self._cache[:, slot] = np.nan  # whoever reads what nobody wrote sees it
            self._cache[:, slot, :positions] = kept
            self.capacities[slot] = capacity
        assert np.all(step.positions < self.capacities[step.slots])
        hidden = np.zeros((step.tokens, HIDDEN), dtype=np.float32)
        if self.embeds:
            for row, (token, position) in enumerate(zip(step.ids, step.positions, strict=True)):
                hidden[row, token % HIDDEN] = 1 + token
                hidden[row] += np.float32(position) / 7
        else:
            hidden[:] = floats_at(inputs, step.tokens)
        for layer in self.layers:
            for row, (slot, position) in enumerate(zip(step.slots, step.positions, strict=True)):
                past = self._cache[layer, slot]
                past[position] = hidden[row]
                mean = past[: position + 1].mean(axis=0, dtype=np.float32)
                hidden[row] = np.tanh(hidden[row] + mean + np.float32(layer))
        if self.has_head:
            weight = np.cos(np.arange(HIDDEN * BOUNDS.vocab, dtype=np.float32)).reshape(HIDDEN, -1)
            for index, row in enumerate(step.rows):
                self._logits[index] = (hidden[row][:, None] * weight).sum(axis=0)
        else:
            floats_at(outputs, step.tokens)[:] = hidden

    def logits(self, rows: int) -> np.ndarray:
        return self._logits[:rows]


def floats_at(address: int, tokens: int) -> np.ndarray:
    """float32 [tokens, HIDDEN] in the memory at `address`."""
    assert address % 64 == 0
    memory = (ctypes.c_float * (tokens * HIDDEN)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(tokens, HIDDEN)


def fake_engine(
    stage: LastStage,
    ring: Transport | Loopback,
    world: int = 1,
    *,
    max_tokens: int = MAX_TOKENS,
    sequences: int = MAX_ROWS,
    positions: int = BOUNDS.slots * BOUNDS.context,
    in_flight: int = IN_FLIGHT,
) -> Engine:
    """An engine in front of a fake stage; tiers of 32, 64 and 96 positions."""
    limits = Limits(
        stages=world,
        tokens=max_tokens,
        sequences=sequences,
        microbatches=in_flight,
        decode_groups=max(1, in_flight - 1),
    )
    slots = Slots(BOUNDS.slots, kv_tiers(BOUNDS.context, (32, 64)), positions)
    return Engine(stage, ring, Scheduler(limits, slots), BOUNDS)


def run(engine: Engine, prompts: dict[str, list[int]], tokens: int) -> dict[str, np.ndarray]:
    """Runs prompts together, `tokens` greedy steps each; the logits of every step by prompt,
    int32 [tokens, vocab], as bits, so that equal means identical."""
    sequences = {name: Sequence(list(ids), greedy) for name, ids in prompts.items()}
    names = {sequence: name for name, sequence in sequences.items()}
    logits: dict[str, list[np.ndarray]] = {name: [] for name in prompts}
    for sequence in sequences.values():
        engine.submit(sequence)
    while sampled := engine.advance():
        for each in sampled:
            steps = logits[names[each.sequence]]
            steps.append(each.logits.copy())
            if len(steps) == tokens:
                engine.finish(each.sequence)
    return {name: np.stack(steps).view(np.int32) for name, steps in logits.items()}


def greedy(logits: np.ndarray, history: object) -> int:
    return int(np.argmax(logits))
