"""However finely a layer is cut, and whatever partitions share, f32 logits are the same bits.

What makes it so: a value is rounded to f32 by each operation and nowhere else. No multiply and add
are contracted over the edge of an island (only `math.fma` fuses), sums of a row keep their order
whatever is fused in front of them, and a store between partitions rounds nothing more.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.launcher.loading import StepSizes, open_engine
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.settings import ModelSettings

#: More than a tile of tokens and a block of the cache, and no multiple of either.
PROMPT = np.array([(7 * i * i + 3) % 250 for i in range(37)], np.int64)
STEPS = 4
OTHERS = [
    Granularity("block"),
    Granularity("fine"),
    Granularity("coarse", Sharing.KERNELS),
    Granularity("coarse", Sharing.WHOLE_GRAPH),
    Granularity("fine", Sharing.NOTHING),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache.open(tmp_path_factory.mktemp("cache"))


def logits(model: Model, cache: Cache) -> np.ndarray:
    """After the prompt's tokens, then after each greedy step."""
    sizes = StepSizes(tokens=64, rows=64, slots=1)
    with open_engine(model, 2, sizes, cache) as (engine, _):
        rows = [np.concatenate([part.copy() for part in engine.score(0, PROMPT)])]
        for step in range(STEPS):
            token = int(rows[-1][-1].argmax())
            rows.append(engine.decode(0, token, len(PROMPT) + step)[None].copy())
    return np.concatenate(rows)


# Those of different parts: biases, soft caps and norms in other places, one projection for all.
SLOW_FAMILIES = ("gemma2", "gpt2", "llama", "bert")
_BERT = {
    "is_decoder": True,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_attention_heads": 5,
}


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_FAMILIES)]
)
def test_every_granularity_gives_the_same_logits(
    family: str, checkpoint: Callable[..., Path], cache: Cache, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text("{}")
    path = checkpoint(family, **(_BERT if family == "bert" else {}))
    model = open_model(ModelSettings(spec=str(spec), local_model=path))
    expected = logits(model, cache)
    assert np.isfinite(expected).all()
    for granularity in OTHERS:
        found = logits(replace(model, granularity=granularity), cache)
        assert np.array_equal(found, expected), granularity
