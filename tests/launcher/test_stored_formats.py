"""Which activations a GGUF file's matrices get."""

import pytest
from gguf import GGMLQuantizationType

from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.launcher.stored_formats import as_stored
from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint
from tests.ranks.checkpoint.gguf_models import random_model, write_gguf

LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return open_checkpoint(
        write_gguf(path, "llama", random_model("llama"), GGMLQuantizationType.Q8_0, {})
    )


def form_of(checkpoint: Checkpoint, name: str, exact: bool) -> str:
    variant = as_stored(VARIANTS["gguf"], checkpoint, exact)
    return variant.linear([f"{name}.weight"], has_bias=False, is_table=False)


@pytest.mark.parametrize(
    "module", ["lm_head", *(f"{LAYER}.self_attn.{each}_proj" for each in "qkv")]
)
def test_the_head_and_the_attention_s_inputs_are_exact(checkpoint: Checkpoint, module: str) -> None:
    assert form_of(checkpoint, module, exact=False) == "q8_0_exact"


@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_other_matrices_multiply_bytes(checkpoint: Checkpoint, module: str) -> None:
    assert form_of(checkpoint, f"{LAYER}.{module}", exact=False) == "q8_0"
    assert form_of(checkpoint, f"{LAYER}.{module}", exact=True) == "q8_0_exact"


def test_other_variants_stay_as_they_are(checkpoint: Checkpoint) -> None:
    assert as_stored(VARIANTS["bf16"], checkpoint, exact=False) == VARIANTS["bf16"]
