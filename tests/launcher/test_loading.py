"""A whole model opened in this process gives what transformers gives."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.launcher.loading import StepSizes, open_engine
from buddy_pipeline.launcher.model import open_model
from buddy_pipeline.launcher.settings import ModelSettings
from tests.checkpoints import reference_logits

PROMPT = np.arange(3, 40, dtype=np.int64) * 5 % 250


def test_scores_of_a_prompt_are_those_of_transformers_and_of_prefill(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen2")
    (tmp_path / "spec.json").write_text('{"model_family": "qwen2"}')
    settings = ModelSettings(spec=str(tmp_path / "spec.json"), variant=None, local_model=folder)
    sizes = StepSizes(tokens=32, rows=7, slots=1)
    with open_engine(open_model(settings), 1, sizes, Cache.open(None)) as (engine, loaded):
        scored = np.concatenate([block.copy() for block in engine.score(0, PROMPT)])
        last = engine.prefill(0, PROMPT).copy()
    expected = reference_logits(folder, PROMPT, 0).prompt
    np.testing.assert_allclose(scored, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(scored[-1], last)
    assert loaded.threads == 1
    assert len(loaded.partitions) >= 3
