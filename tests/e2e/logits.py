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

NEW_TOKENS = 16


def compute(engine: Engine, prompt: np.ndarray) -> dict[str, np.ndarray]:
    each = [engine.decode(0, int(token), at).copy() for at, token in enumerate(prompt)]
    last = logits = engine.prefill(0, prompt).copy()
    tokens, steps = [], []
    for position in range(len(prompt), len(prompt) + NEW_TOKENS):
        tokens.append(int(np.argmax(logits)))
        logits = engine.decode(0, tokens[-1], position).copy()
        steps.append(logits)
    return {
        "prompt": np.stack(each),
        "last": last,
        "tokens": np.array(tokens),
        "steps": np.stack(steps),
    }


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
