"""The loop of every rank but rank 0: receive a message, do what it asks, send it on."""

from __future__ import annotations

import time
from typing import Protocol

from buddy_pipeline.ranks.memory import peak_memory
from buddy_pipeline.ranks.messages import Kind, Step
from buddy_pipeline.ranks.transport import Transport


class StepRunner(Protocol):
    """What the loops need of a stage."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute: the output is the input."""

    def run(self, step: Step, inputs: int, outputs: int) -> None:
        """Carry out the step's slot changes, then run the block on it.

        inputs, outputs: addresses of the payload that arrived and of the one to write, each
        [tokens, bytes per token] and aligned to 64 bytes.
        """


def serve(stage: StepRunner, transport: Transport) -> None:
    """Serve this rank's part of the pipeline until STOP; returns when all it sent has left."""
    while True:
        step = transport.receive()
        if step.kind is Kind.STEP and not stage.is_empty:
            following = transport.carry_on(step)
            begun = time.perf_counter_ns()
            stage.run(step, step.payload_address, following.payload_address)
            following.add_time(time.perf_counter_ns() - begun)
            transport.send(following)
        elif step.kind is Kind.PEAK_MEMORY:
            following = transport.carry_on(step, payload=len(step.payload) + 8)
            following.payload_words[:-1] = step.payload_words
            following.payload_words[-1] = peak_memory()
            transport.send(following)
        else:
            transport.forward(step)
            if step.kind is Kind.STOP:
                transport.close()
                return
