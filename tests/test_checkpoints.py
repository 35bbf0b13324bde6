"""The tiny checkpoints are worth testing against: they load, and their logits say something."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import BOS_ID, EOS_ID, FAMILIES, VOCAB_SIZE, reference_logits

PROMPT = np.arange(3, 43, dtype=np.int64)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_with_logits_that_differ(
    checkpoint: Callable[..., Path], family: str
) -> None:
    reference = reference_logits(checkpoint(family), PROMPT, 4)
    assert reference.prompt.shape == (40, VOCAB_SIZE)
    assert reference.steps.shape == (4, VOCAB_SIZE)
    assert reference.tokens[0] == reference.prompt[-1].argmax()
    assert np.isfinite(reference.prompt).all()
    assert reference.prompt.std(axis=1).min() > 0.3
    # What stands further back in the prompt reaches the last logits through attention.
    changed = reference_logits(checkpoint(family), np.r_[100, PROMPT[1:]], 0)
    assert np.abs(changed.prompt[1] - reference.prompt[1]).max() > 0.01


def test_shards_and_tied_heads_are_as_asked(checkpoint: Callable[..., Path]) -> None:
    sharded = checkpoint("llama", max_shard_size="100KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    assert len(list(sharded.glob("*.safetensors"))) > 1
    untied = checkpoint("qwen2", tie_word_embeddings=False)
    tied = checkpoint("qwen2")
    sizes = [(path / "model.safetensors").stat().st_size for path in (untied, tied)]
    assert sizes[0] - sizes[1] >= VOCAB_SIZE * 60 * 4


def test_a_checkpoint_is_written_once_a_session(checkpoint: Callable[..., Path]) -> None:
    assert checkpoint("gpt2") == checkpoint("gpt2")
    assert checkpoint("gpt2") != checkpoint("gpt2", seed=1)


def test_tokenizer_takes_any_text(checkpoint: Callable[..., Path]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint("gpt2") / "tokenizer.json"))
    text = "naïve 🦆\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<s></s>").ids == [BOS_ID, EOS_ID]
