"""The program that tests start on every rank: all logits of a prompt and of its continuation.

    logits.py CHECKPOINT CACHE PROMPT.npy OUT.npz

Rank 0 writes `prompt`, float32 [prompt, vocab]: the logits after each token of the prompt, one
token at a time; `last`, float32 [vocab]: the logits after the whole prompt, in one piece; and
`tokens` and `steps`, the greedy continuation and the logits after each of its tokens.
"""

import sys
from pathlib import Path

import numpy as np

from buddy_pipeline.launcher.prompt import PromptSource
from buddy_pipeline.launcher.session import open_session
from buddy_pipeline.launcher.settings import RunSettings
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.faults import CollectiveExit
from buddy_pipeline.ranks.sampling import SamplingOptions

NEW_TOKENS = 16


def settings(checkpoint: Path, cache: Path) -> RunSettings:
    spec = checkpoint / "spec.json"  # written by the test
    return RunSettings(
        spec=str(spec),
        variant=None,
        local_model=checkpoint,
        threads=None,
        split=None,
        cache_dir=cache,
        prompt=PromptSource(text="unused"),
        sampling=SamplingOptions(),
        top_logits=0,
        json_path=None,
        stats=False,
    )


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


def main(checkpoint: str, cache: str, prompt: str, out: str) -> None:
    with open_session(settings(Path(checkpoint), Path(cache))) as session:
        if session.engine is None:
            session.serve()
        else:
            np.savez(out, **compute(session.engine, np.load(prompt)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except CollectiveExit as leaving:
        sys.exit(leaving.code)
