"""The program that tests start on every rank: all logits of a prompt and of its continuation.

    logits.py CHECKPOINT CACHE PROMPT.npy OUT.npz

Rank 0 writes `prompt`, float32 [prompt, vocab]: the logits after each token of the prompt, one
token at a time; `last`, float32 [vocab]: the logits after the whole prompt, in one piece; and
`tokens` and `steps`, the greedy continuation and the logits after each of its tokens.
"""

import sys
from pathlib import Path

import numpy as np

from buddy_pipeline.launcher import cli, running
from buddy_pipeline.launcher.session import open_session
from buddy_pipeline.launcher.settings import RunSettings
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.sampling import Sampler
from buddy_pipeline.ranks.sequence import Sequence

NEW_TOKENS = 16


def compute(engine: Engine, prompt: np.ndarray) -> dict[str, np.ndarray]:
    ids = prompt.tolist()
    # The whole prompt first: it could share what the other has computed, but not the other way.
    tokens, steps = run(engine, ids, NEW_TOKENS + 1, lambda logits, _: int(np.argmax(logits)))
    _, each = run(engine, ids[:1], len(ids), lambda _, history: ids[len(history) % len(ids)])
    return {
        "prompt": np.stack(each),
        "last": steps[0],
        "tokens": np.array(tokens[:NEW_TOKENS]),
        "steps": np.stack(steps[1:]),
    }


def run(
    engine: Engine, ids: list[int], steps: int, choose: Sampler
) -> tuple[list[int], list[np.ndarray]]:
    """The next tokens after `ids`, and the logits that each was chosen from."""
    sequence, logits = Sequence(list(ids), choose), []
    engine.submit(sequence)
    for _ in range(steps):
        (sampled,) = engine.advance()
        logits.append(sampled.logits.copy())
    engine.finish(sequence)
    return sequence.ids[len(ids) :], logits


def main(checkpoint: str, cache: str, prompt: str, out: str) -> int:
    def write_logits(settings: RunSettings) -> int:
        with open_session(settings) as session:
            if session.engine is None:
                session.serve()
            else:
                np.savez(out, **compute(session.engine, np.load(prompt)))
        return 0

    # The command line makes the settings; then this takes the place of the answer.
    running.run_command = write_logits
    spec = Path(checkpoint) / "spec.json"
    spec.write_text("{}")
    model = ["--spec", str(spec), "--local-model", checkpoint]
    return cli.main([*model, "--cache-dir", cache, "--prompt", "unused"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
