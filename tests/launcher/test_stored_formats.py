"""Which activations a GGUF file's matrices get."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.launcher.stored_formats import as_stored
from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint
from tests.ranks.checkpoint.gguf_models import random_model, write_gguf

LAYER = "model.layers.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def checkpoint_in(folder: Path, kind: str, model: str = "llama") -> Checkpoint:
    path = folder / f"{model}-{kind}.gguf"
    if not path.exists():
        write_gguf(path, model, random_model(model), GGMLQuantizationType[kind], {})
    return open_checkpoint(path)


def form_of(checkpoint: Checkpoint, name: str, exact: bool = False) -> str:
    variant = as_stored(VARIANTS["gguf"], checkpoint, exact)
    return variant.linear([f"{name}.weight"], has_bias=False, is_table=False)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q6_K"])
def test_inputs_of_few_bits_are_bytes_but_for_the_head_and_the_attention(
    folder: Path, kind: str
) -> None:
    model = "llama_wide" if kind == "Q6_K" else "llama"
    checkpoint, form = checkpoint_in(folder, kind, model), kind.lower()
    head = "model.embed_tokens" if checkpoint.ties_head else "lm_head"
    for module in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        assert form_of(checkpoint, f"{LAYER}.{module}") == form
    for module in (head, *(f"{LAYER}.self_attn.{each}_proj" for each in "qkv")):
        assert form_of(checkpoint, module) == f"{form}_a16"


def test_inputs_of_fused_attention_are_wide(folder: Path) -> None:
    checkpoint = checkpoint_in(folder, "Q4_0", "gpt2")
    assert form_of(checkpoint, "transformer.h.0.attn.c_attn") == "q4_0_a16"
    assert form_of(checkpoint, "transformer.wte") == "q4_0_a16"  # the head's matrix too
    assert form_of(checkpoint, "transformer.h.0.mlp.c_fc") == "q4_0"


@pytest.mark.parametrize("module", ["lm_head", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.down_proj"])
def test_inputs_of_eight_bits_are_wide_throughout(folder: Path, module: str) -> None:
    assert form_of(checkpoint_in(folder, "Q8_0"), module) == "q8_0_a16"


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("module", ["lm_head", f"{LAYER}.mlp.gate_proj"])
def test_exact_inputs_are_f32(folder: Path, kind: str, module: str) -> None:
    assert form_of(checkpoint_in(folder, kind), module, exact=True) == f"{kind.lower()}_exact"


def test_types_that_leave_no_choice_have_one_form(folder: Path) -> None:
    checkpoint = checkpoint_in(folder, "F16")
    assert form_of(checkpoint, "lm_head") == form_of(checkpoint, "lm_head", exact=True) == "f16"
    checkpoint = checkpoint_in(folder, "BF16")
    assert form_of(checkpoint, "lm_head") == "bf16"
    assert form_of(checkpoint, "lm_head", exact=True) == "bf16_exact"


def test_other_variants_stay_as_they_are(folder: Path) -> None:
    checkpoint = checkpoint_in(folder, "Q8_0")
    assert as_stored(VARIANTS["bf16"], checkpoint, exact=False) == VARIANTS["bf16"]
