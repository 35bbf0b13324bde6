"""A converted model comes back from its GGUF file with the weights and the configuration it had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.checkpoint.gguf_architectures import ARCHITECTURES
from tests.ranks.checkpoint.gguf_models import CASES, hf_tensors, random_model, write_gguf

Converted = tuple[Any, Path]

# Fields that a GGUF file does not hold and that change nothing here: names, training, defaults of
# other classes. Everything else of the configuration must come back.
_NOT_IN_GGUF = {
    "_name_or_path",
    "attn_implementation",
    "dtype",
    "initializer_range",
    "sep_token_id",
    "transformers_version",
    "use_cache",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Converted]:
    """`converted(case)`: the transformers model of a case and its GGUF file in F32."""
    written: dict[str, Converted] = {}

    def convert(case: str) -> Converted:
        if case not in written:
            model = random_model(case)
            path = tmp_path_factory.mktemp("gguf") / f"{case}.gguf"
            written[case] = (model, write_gguf(path, case, model))
        return written[case]

    return convert


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _, _ in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_weights_come_back_under_their_names(
    converted: Callable[[str], Converted], case: str
) -> None:
    model, path = converted(case)
    checkpoint = open_checkpoint(path)
    expected = hf_tensors(model)
    assert set(checkpoint.tensors) == set(expected)
    for name, values in expected.items():
        assert checkpoint.expect(name, shape=values.shape).dtype == "F32"
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        assert read.flags.c_contiguous
        # Norms stored as 1 + weight lose the bits that the 1 took.
        np.testing.assert_allclose(read, values, rtol=0, atol=2e-7, err_msg=name)
    assert checkpoint.element_count() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_configuration_comes_back(converted: Callable[[str], Converted], case: str) -> None:
    from transformers import AutoConfig

    model, path = converted(case)
    config = dict(open_checkpoint(path).config)
    assert config["architectures"] == [type(model).__name__]
    rebuilt = AutoConfig.for_model(config.pop("model_type"), **config).to_dict()
    for key, value in model.config.to_dict().items():
        if key not in _NOT_IN_GGUF and key != "architectures":
            assert rebuilt[key] == value, key


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.weight"),
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("llama_biased", "model.layers.0.self_attn.k_proj.bias"),
        ("llama", "model.embed_tokens.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.bias"),
        ("gemma2", "model.norm.weight"),
    ],
)
def test_any_rows_can_be_read_alone(
    converted: Callable[[str], Converted], case: str, name: str
) -> None:
    checkpoint = open_checkpoint(converted(case)[1])
    whole = checkpoint.read(name)
    rows = len(whole)
    for start, stop in [(0, 1), (rows - 1, rows), (5, 23), (3, 3), (rows, rows), (0, rows)]:
        part = checkpoint.read_rows(name, start, stop)
        np.testing.assert_array_equal(part, whole[start:stop])
        assert part.flags.c_contiguous
        assert part.flags.owndata or part.base is not None


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_quantised_matrices_are_their_dequantised_values(
    tmp_path: Path, converted: Callable[[str], Converted], case: str, kind: str
) -> None:
    ggml_type = GGMLQuantizationType[kind]
    model, _ = converted(case)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", case, model, ggml_type))
    for name, values in hf_tensors(model).items():
        if values.ndim == 1:
            continue
        # Blocks run along the stored rows, which for GPT-2's projections are HF's columns.
        transposed = case == "gpt2" and ".h." in name
        stored = np.ascontiguousarray(values.T if transposed else values)
        expected = quants.dequantize(quants.quantize(stored, ggml_type), ggml_type)
        expected = expected.T if transposed else expected
        assert checkpoint.tensors[name].dtype == kind
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)
        part = checkpoint.read_rows(name, 7, 29)
        np.testing.assert_array_equal(part, expected[7:29], err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("case", ["mixtral", "qwen3moe"])
def test_stacks_of_experts_are_their_dequantised_values(
    tmp_path: Path, converted: Callable[[str], Converted], case: str, kind: str
) -> None:
    ggml_type = GGMLQuantizationType[kind]
    model, _ = converted(case)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", case, model, ggml_type))
    stacks = {name: values for name, values in hf_tensors(model).items() if values.ndim == 3}
    assert len(stacks) == 4
    for name, values in stacks.items():
        expected = quants.dequantize(quants.quantize(values, ggml_type), ggml_type)
        expected = expected.reshape(values.shape)
        assert checkpoint.expect(name, shape=values.shape).dtype == kind
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)
        np.testing.assert_array_equal(checkpoint.read_rows(name, 1, 3), expected[1:3])
        outputs = expected.reshape(-1, values.shape[-1])
        np.testing.assert_array_equal(checkpoint.read_outputs(name, 5, 150), outputs[5:150])
        assert checkpoint.keeps_outputs(name, transposed=False)
        stored = quants.quantize(outputs[5:150], ggml_type).view(np.uint8)
        if kind != "Q4_1":  # whose scales change when values are quantised again
            np.testing.assert_array_equal(checkpoint.stored_outputs(name, 5, 150), stored)


def test_experts_in_a_file_that_counts_none_are_refused(
    tmp_path: Path, converted: Callable[[str], Converted]
) -> None:
    from buddy_pipeline.partition.errors import UserError

    path = write_gguf(tmp_path / "m.gguf", "mixtral", converted("mixtral")[0])
    path.write_bytes(path.read_bytes().replace(b"llama.expert_count", b"llama.expert_kount"))
    with pytest.raises(UserError, match=r"expert_count .* positive in a file with .*_exps"):
        open_checkpoint(path)


def test_llama3_scaling_of_the_published_models_is_recognised() -> None:
    """Factors of Llama 3.1 and 3.2, which transformers computes, give their published values."""
    from buddy_pipeline.ranks.checkpoint.gguf_rope import _llama3, _llama3_factors

    frequencies = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = _llama3_factors(frequencies, 32.0, 1.0, 4.0, 8192).astype(np.float32)
    assert _llama3(None, factors, 500000.0, 64) == {  # type: ignore[arg-type]
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_biases_on_some_layers_only_are_refused(
    tmp_path: Path, converted: Callable[[str], Converted]
) -> None:
    from buddy_pipeline.partition.errors import UserError

    model, _ = converted("llama_biased")
    path = write_gguf(tmp_path / "m.gguf", "llama_biased", model)
    # Rename one bias to another tensor that llama may have: the layer then lacks it.
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v.bias", b"blk.1.ffn_up.bias"))
    with pytest.raises(UserError, match="only some of attn_q, attn_k, attn_v, attn_output"):
        open_checkpoint(path)
