"""What is measured of a pipeline, on the ranks that it has: each task is one start of all ranks."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchkit.limits import LimitMeter, Limits, Objects
from buddy_pipeline.launcher.api import Pipeline
from buddy_pipeline.launcher.settings import Balance
from buddy_pipeline.ranks.affinity import prepare_threads
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.messages import Bounds, Kind, Step
from buddy_pipeline.ranks.sampling import SamplingOptions, make_sampler
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.serve import serve
from buddy_pipeline.ranks.transport import Transport
from buddy_pipeline.ranks.world import World, join_world

#: Random ids from 1 up to this, which every vocabulary has.
_IDS = 250
_CHANCE = 7
#: Of the measurement of a team.
_MEGABYTES, _REPETITIONS = 512, 5


@dataclass(frozen=True)
class Task:
    """One of the functions below by name, on a model with so many ranks and threads a rank."""

    name: str
    world: int
    spec: str
    local_model: str | None = None
    variant: str | None = None
    threads: int = 1
    sequences: int = 1
    prompt: int = 16
    tokens: int = 32
    rounds: int = 1
    balance: str = "even"
    profile_out: str | None = None

    def run(self) -> Any:
        """Takes part as this rank; the result, on rank 0 only."""
        if self.name == "hop":
            return hop(self.rounds)
        with Pipeline.from_spec(
            self.spec,
            local_model=self.local_model,
            variant=self.variant,
            threads=self.threads,
            max_sequences=self.sequences,
            balance=Balance(self.balance),
            profile_out=self.profile_out,
        ) as pipeline:
            return _TASKS[self.name](pipeline.engine, self)

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def identity(engine: Engine, task: Task) -> dict[str, list[str]]:
    """Digests of tokens and logits of sequences that run together, and of each alone.

    Lengths and arrivals are mixed; every other sequence is sampled with a seed.
    """

    def fresh() -> list[Sequence]:
        chance = random.Random(_CHANCE)
        made = []
        for number in range(task.sequences):
            options = SamplingOptions(temperature=0.8 * (number % 2), top_p=0.9, seed=number)
            ids = [chance.randint(1, _IDS) for _ in range(chance.randint(1, task.prompt))]
            made.append(Sequence(ids, make_sampler(options)))
        return made

    chance = random.Random(_CHANCE + 1)
    tokens = [chance.randint(1, task.tokens) for _ in range(task.sequences)]
    arrivals = deque((s, chance.randint(0, 4)) for s in fresh())
    together = _digests(engine, arrivals, tokens)
    alone = [_digests(engine, deque([(s, 0)]), [tokens[i]])[0] for i, s in enumerate(fresh())]
    return {"together": together, "alone": alone}


def _digests(engine: Engine, arrivals: deque[tuple[Sequence, int]], tokens: list[int]) -> list[str]:
    """Runs sequences that arrive so many rounds after the one before."""
    order = [sequence for sequence, _ in arrivals]
    left = dict(zip(order, tokens, strict=True))
    digests = {sequence: hashlib.sha256() for sequence in order}
    wait = 0
    while left:
        while arrivals and wait <= 0:
            engine.submit(arrivals.popleft()[0])
            wait = arrivals[0][1] if arrivals else 0
        wait -= 1
        for each in engine.advance():
            digests[each.sequence].update(each.token.to_bytes(8, "little"))
            digests[each.sequence].update(np.ascontiguousarray(each.logits).tobytes())
            left[each.sequence] -= 1
            if not left[each.sequence]:
                engine.finish(each.sequence)
                del left[each.sequence]
    return [digests[sequence].hexdigest() for sequence in order]


def decode(engine: Engine, task: Task) -> list[float]:
    """Tokens/s of greedy sequences once all of them decode, a figure a round."""
    return [tokens / (end - begin) * 1e9 for begin, end, tokens in decode_windows(engine, task)]


def decode_windows(engine: Engine, task: Task) -> list[tuple[int, int, int]]:
    """Of each round, when all sequences decode: begin and end, ns of `time.perf_counter_ns`, and
    the tokens that were sampled in between."""
    windows = []
    for number in range(task.rounds):
        sequences = _prompts(task, number)
        for sequence in sequences:
            engine.submit(sequence)
        while any(len(s.ids) == s.prompt_length for s in sequences):
            engine.advance()
        before, begin = sum(len(s.ids) for s in sequences), time.perf_counter_ns()
        while (count := sum(len(s.ids) for s in sequences)) - before < task.tokens * task.sequences:
            engine.advance()
        windows.append((begin, time.perf_counter_ns(), count - before))
        for sequence in sequences:
            engine.finish(sequence)
    return windows


def prefill(engine: Engine, task: Task) -> list[float]:
    """Tokens/s of one prompt up to its first token, a figure a round."""
    rates = []
    for number in range(task.rounds):
        (sequence,) = _prompts(task, number)
        begun = time.perf_counter()
        engine.submit(sequence)
        engine.advance()
        rates.append(task.prompt / (time.perf_counter() - begun))
        engine.finish(sequence)
    return rates


def _prompts(task: Task, number: int) -> list[Sequence]:
    """Prompts of random ids, which share nothing with those of other rounds."""
    chance = random.Random(number)
    greedy = make_sampler(SamplingOptions())
    return [
        Sequence([chance.randint(1, _IDS) for _ in range(task.prompt)], greedy)
        for _ in range(task.sequences)
    ]


_TASKS: dict[str, Callable[[Engine, Task], Any]] = {
    each.__name__: each for each in (identity, decode, decode_windows, prefill)
}


class Team:
    """A team of threads of a process of its own, to see what cores give together."""

    def __init__(self, objects: Objects, threads: int) -> None:
        prepare_threads(join_world({}), threads)
        self._meter = LimitMeter(objects, threads, _MEGABYTES)

    def measure(self) -> Limits:
        """The best of some repetitions."""
        return self._meter.measure(_REPETITIONS)


class _EmptyStage:
    """A stage that computes nothing but is asked to."""

    is_empty = False

    def run(self, step: Step, inputs: int, outputs: int) -> None:
        """Leaves the payload as it is."""


def hop(rounds: int) -> dict[str, list[float]] | None:
    """Microseconds of one hop, over the ranks of the ring: of a one-token step, and of an MPI
    message as long without anything else.

    Of a step each rank receives, runs an empty stage and sends 1,536 f32 on. All ranks need cores
    of their own.
    """
    world = join_world()
    if len(os.sched_getaffinity(0)) < world.local_size:
        raise SystemExit("hop: there are more ranks than cores, which polling does not show right")
    payload = 1536 * 4
    bytes_in = 0 if world.rank == world.world - 1 else payload
    bytes_out = 0 if world.rank == 0 else payload
    bounds = Bounds(context=16, slots=1, vocab=16)
    ring = Transport(world, 1, 1, bytes_in, bytes_out, bounds, max_changes=0, in_flight=1)
    times = []
    if world.rank != 0:
        serve(_EmptyStage(), ring)
    else:
        for _ in range(rounds):
            begun = time.perf_counter()
            step = ring.begin(Kind.STEP, 1, 1)
            step.positions[:] = step.slots[:] = step.ids[:] = step.rows[:] = 0
            ring.send(step)
            ring.receive()
            times.append((time.perf_counter() - begun) / world.world * 1e6)
        ring.send(ring.begin(Kind.STOP))
        ring.receive()
        ring.close()
    plain = _plain_hop(world, payload, rounds)
    return {"steps": times, "plain": plain} if world.rank == 0 else None


def _plain_hop(world: World, size: int, rounds: int) -> list[float]:
    """Microseconds of a message of `size` bytes from rank to rank, received by blocking."""
    message = np.zeros(size, np.uint8)
    to, source = (world.rank - 1) % world.world, (world.rank + 1) % world.world
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        if world.rank == 0:
            world.comm.Send(message, to)
        world.comm.Recv(message, source)
        if world.rank != 0:
            world.comm.Send(message, to)
        times.append((time.perf_counter() - begun) / world.world * 1e6)
    return times
