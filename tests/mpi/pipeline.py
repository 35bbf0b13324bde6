"""The program that tests start on every rank: a pipeline of fake stages, with a fault on request.

    pipeline.py [FAULT [RANK [STEP_TIMEOUT]]]

Rank 0 prints a JSON object with what the pipeline computed. FAULT is one of the functions below
that take a rank's `Faulty` stage, one of PAUSES, or a fault in preparation; RANK is where it
happens ("all" for all).
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks import roll_call
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.faults import CollectiveExit, agree, end_now, exit_alone, guarded
from buddy_pipeline.ranks.messages import Step
from buddy_pipeline.ranks.roll_call import Attendance, RollCall, attendance_of, attended
from buddy_pipeline.ranks.serve import serve
from buddy_pipeline.ranks.transport import Loopback, Transport
from buddy_pipeline.ranks.watchdog import WatchedStage
from buddy_pipeline.ranks.world import World, join_world
from tests.mpi.fake_stage import (
    BOUNDS,
    IN_FLIGHT,
    MAX_CHANGES,
    MAX_ROWS,
    MAX_TOKENS,
    FakeStage,
    fake_engine,
    run,
)

roll_call.PREPARING_S = 1.0  # instead of what a slow disk may need
FAULT_STEP = 3
LONG = [5 * i % BOUNDS.vocab for i in range(60)]
PROMPTS = {
    "long": LONG,
    "short": [3, 1, 4],
    "one": [7],
    "like long": [*LONG[:50], 1, 2, 3],
    "waits for a place": [2, 7, 1, 8, 2, 8],
    "like long too": [*LONG[:40], 9],
}
TOKENS = 9


class Faulty(FakeStage):
    """A stage that has its fault in step FAULT_STEP, or in no step."""

    def __init__(self, world: World, transport: Transport | Loopback, fault: str) -> None:
        super().__init__(world.rank, world.world)
        self.world = world
        self.transport = transport
        self.fault = fault

    def run(self, step: Step, inputs: int, outputs: int) -> None:
        if len(self.steps) == FAULT_STEP and self.fault:
            FAULTS[self.fault](self, step)
        super().run(step, inputs, outputs)


def raises(stage: Faulty, step: Step) -> None:
    raise RuntimeError("the kernel\nfell over")


def user_error(stage: Faulty, step: Step) -> None:
    raise UserError("file w.gguf was cut short: copy it again")


def declines(stage: Faulty, step: Step) -> None:
    raise UserError("stop string is empty: leave it out")


def killed(stage: Faulty, step: Step) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminated(stage: Faulty, step: Step) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def hangs(stage: Faulty, step: Step) -> None:
    print("hanging", os.getpid(), flush=True)
    time.sleep(60)


def stopped(stage: Faulty, step: Step) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_slow(stage: Faulty, step: Step) -> None:
    time.sleep(0.8)


def sends_noise(stage: Faulty, step: Step) -> None:
    send_bytes(stage, bytes(range(200)))


def sends_too_much(stage: Faulty, step: Step) -> None:
    send_bytes(stage, bytes(100_000))


def repeats_a_step(stage: Faulty, step: Step) -> None:
    assert isinstance(stage.transport, Transport)
    message = stage.transport.carry_on(step)
    message.payload[:] = 0
    send_bytes(stage, message.message.tobytes())


def send_bytes(stage: Faulty, message: bytes) -> None:
    """Send to the next rank what the transport would never send, where it expects a step."""
    world = stage.world
    world.comm.Send(message, (world.rank - 1) % world.world, 1)


FAULTS = {
    each.__name__: each
    for each in (
        raises,
        user_error,
        declines,
        killed,
        terminated,
        hangs,
        stopped,
        is_slow,
        sends_noise,
        sends_too_much,
        repeats_a_step,
    )
}


PAUSES = {  # of rank 0 between two prompts, as where a user is asked what comes next
    "idles": lambda: time.sleep(4.0),
    "stopped_idle": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def prepare(world: World, fault: str) -> None:
    """Agree on the result of a preparation that may have failed, or not have ended."""
    if fault == "stopped_preparing":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "prepares_long":
        time.sleep(4.0)
    problem = {
        "not_ready": "model m does not exist: give its path",
        "not_ready_each": f"rank {world.rank} has no weights",
    }
    agree(world, problem.get(fault))


def transport_of(world: World, part: RollCall | Attendance | None) -> Transport | Loopback:
    shape = FakeStage(world.rank, world.world)
    if world.comm is None:
        return Loopback(MAX_TOKENS, MAX_ROWS, max_changes=MAX_CHANGES, in_flight=IN_FLIGHT)
    return Transport(
        world,
        MAX_TOKENS,
        MAX_ROWS,
        shape.input_bytes,
        shape.output_bytes,
        BOUNDS,
        max_changes=MAX_CHANGES,
        in_flight=IN_FLIGHT,
        part=part,
    )


def generate(engine: Engine) -> dict[str, object]:
    """All prompts together, and each alone; and what else the engine tells."""
    together = run(engine, PROMPTS, TOKENS)
    alone = {name: run(engine, {name: ids}, TOKENS)[name] for name, ids in PROMPTS.items()}
    return {
        "together": {name: logits.tolist() for name, logits in together.items()},
        "alone": {name: logits.tolist() for name, logits in alone.items()},
        "peak_memory": engine.peak_memory(),
    }


def main(fault: str = "", where: str = "all", step_timeout: str = "") -> None:
    world = join_world()
    seconds = float(step_timeout) if step_timeout else None
    with guarded(world):
        here = fault if where in ("all", str(world.rank)) else ""
        part = None
        if seconds is not None and world.comm is not None:
            part = attendance_of(world.comm, seconds)
        with nullcontext() if part is None else attended(part, partial(end_now, world)):
            prepare(world, here)
        transport = transport_of(world, part)
        faulty = Faulty(world, transport, here if here in FAULTS else "")
        stage = faulty if seconds is None else WatchedStage(faulty, world, seconds)
        if world.rank != 0:
            assert isinstance(transport, Transport)
            serve(stage, transport)
            return
        engine = fake_engine(stage, transport, world.world)
        try:
            if here in PAUSES:
                run(engine, {"first": [1, 2, 3]}, TOKENS)
                print(here, flush=True)
                PAUSES[here]()
            result = generate(engine)
        except UserError as error:
            if here != "declines":
                raise
            engine.close()  # with later steps still on their way
            exit_alone(error)
        engine.close()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except CollectiveExit as leaving:
        # As the launcher does: after the guard, with every rank on its way out.
        sys.exit(leaving.code)
