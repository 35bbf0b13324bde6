"""A pipeline of simulated stages: the scheduler's decisions, played through with made-up times."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from buddy_pipeline.ranks.scheduler import Microbatch, Scheduler
from buddy_pipeline.ranks.sequence import Sequence


@dataclass
class Outcome:
    """What came of a simulation; times in seconds of the simulated clock."""

    busy: list[float]
    """Of each stage."""
    end: float
    admitted: list[Sequence]
    """In the order in which prompts began."""
    finished: dict[Sequence, float]
    token_times: dict[Sequence, list[float]]

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they did nothing."""
        return 1 - sum(self.busy) / (self.end * len(self.busy))


def simulate(
    scheduler: Scheduler,
    arrivals: Iterable[tuple[float, Sequence, int]],
    stage_time: Callable[[int, Microbatch], float],
    on_step: Callable[[Microbatch], None] = lambda microbatch: None,
) -> Outcome:
    """Run sequences that arrive at (time, sequence, tokens to generate), by time, to the end.

    stage_time: seconds that a stage takes for a microbatch. Stages run in order and one microbatch
    at a time; a token is sampled when the last stage is done.
    """
    stages = scheduler.limits.stages
    free_at = [0.0] * stages
    result = Outcome([0.0] * stages, 0.0, [], {}, {})
    queue = deque(arrivals)
    wanted = {sequence: tokens for _, sequence, tokens in queue}
    under_way: list[tuple[float, int, Microbatch]] = []
    number, now = 0, 0.0
    while queue or under_way or scheduler.waiting or scheduler.running:
        while queue and queue[0][0] <= now:
            scheduler.add(queue.popleft()[1])
        while (microbatch := scheduler.next()) is not None:
            on_step(microbatch)
            at = now
            for stage in range(stages):
                seconds = stage_time(stage, microbatch)
                at = free_at[stage] = max(at, free_at[stage]) + seconds
                result.busy[stage] += seconds
            heapq.heappush(under_way, (at, number, microbatch))
            number += 1
            for piece in microbatch.pieces:
                if piece.sequence not in result.token_times:
                    result.token_times[piece.sequence] = []
                    result.admitted.append(piece.sequence)
        if under_way and (not queue or under_way[0][0] <= queue[0][0]):
            now, _, microbatch = heapq.heappop(under_way)
            _complete(scheduler, microbatch, wanted, result, now)
        elif queue:
            now = queue[0][0]
        else:
            raise AssertionError("sequences wait and nothing is under way")
    result.end = now
    return result


def _complete(
    scheduler: Scheduler,
    microbatch: Microbatch,
    wanted: dict[Sequence, int],
    result: Outcome,
    now: float,
) -> None:
    last = [piece.sequence for piece in microbatch.pieces if piece.is_last]
    for sequence in last:
        sequence.ids.append(len(sequence.ids))
        result.token_times[sequence].append(now)
    scheduler.done(microbatch)
    for sequence in last:
        if len(result.token_times[sequence]) == wanted[sequence]:
            scheduler.finish(sequence)
            result.finished[sequence] = now
