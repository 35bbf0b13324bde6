"""Conversions that cannot be are refused; those that were interrupted go on."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.checkpoint.quantised_directory import METHOD, PARTIAL
from buddy_pipeline.ranks.packing import pack, packed_bytes
from buddy_pipeline.ranks.quantising import convert, plan_conversion

SHAPE = (3, 5, 40)


def stack_parameter(name: str, variant_form: str) -> Parameter:
    is_turned = name == "turned"
    shape = (SHAPE[0], SHAPE[2], SHAPE[1]) if is_turned else SHAPE
    return Parameter("panels", (WeightPart((name,), (), shape, is_turned),), 32, variant_form)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    """A stack of experts as [outputs, inputs], one as [inputs, outputs], and one in pieces."""
    source = tmp_path / "experts"
    source.mkdir()
    random = np.random.default_rng(0)
    stack = random.standard_normal(SHAPE, np.float32)
    pieces = {f"m.experts.{i}.w2.weight": stack[i] for i in range(SHAPE[0])}
    turned = np.ascontiguousarray(stack.transpose(0, 2, 1))
    save_file({"plain": stack, "turned": turned, **pieces}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return source


@pytest.mark.parametrize("name", ["plain", "turned", "m.experts.down_proj"])
@pytest.mark.parametrize(("variant", "form"), [("w8a8", "w8a8"), ("w8a16", "w8a16")])
def test_a_stack_of_experts_is_packed_as_one_that_is_quantised_at_load(
    experts: Path, tmp_path: Path, name: str, variant: str, form: str
) -> None:
    parameter = stack_parameter(name, form)
    original, folder = open_checkpoint(experts), tmp_path / "out"
    conversion = plan_conversion(original, [parameter], variant, biased=True)
    counted: list[int] = []

    def describe(folder: Path) -> None:
        how = {"quant_method": METHOD, "variant": variant}
        config = {"model_type": "mixtral", "quantization_config": how}
        (folder / "config.json").write_text(json.dumps(config))

    convert(conversion, folder, counted.append, [describe])
    assert sum(counted) == conversion.bytes
    quantised = open_checkpoint(folder)
    packed = [np.zeros(packed_bytes(parameter), np.uint8) for _ in range(2)]
    pack(parameter, original, packed[0])
    pack(parameter, quantised, packed[1])
    assert packed[0].any() and (packed[0] == packed[1]).all()
    # What records stand for, as whoever computes in f32 reads it: whole, and one expert.
    values, wanted = quantised.read(name), original.read(name)
    assert values.shape == wanted.shape
    assert np.abs(values - wanted).max() <= np.abs(wanted).max() / 250
    assert (quantised.read_rows(name, 1, 3) == values[1:]).all()
    outputs = values.reshape(-1, values.shape[-1])
    assert (quantised.read_outputs(name, 2, 11) == outputs[2:11]).all()


def test_what_the_variant_leaves_alone_of_experts_is_kept(experts: Path) -> None:
    kept = stack_parameter("plain", "bf16")
    assert not plan_conversion(open_checkpoint(experts), [kept], "w8a8", biased=True).matrices


def test_what_an_interrupted_run_was_writing_does_not_stay(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file({"a.weight": np.ones((8, 32), np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    matrix = WeightPart(("a.weight",), (), (8, 32), False)
    parameters = [Parameter("panels", (matrix,), 32, "w8a8")]
    conversion = plan_conversion(open_checkpoint(source), parameters, "w8a8", biased=True)

    def killed(count: int) -> None:
        raise SystemExit

    folder.mkdir()
    (folder / f".{PARTIAL}.0f1e").touch()  # the first thing that is written
    with pytest.raises(SystemExit):
        convert(conversion, folder, killed, [])
    # A process that is killed leaves these as well.
    (folder / f".{conversion.shard_name(0)}.4711").touch()
    (folder / ".tokenizer.json.00c0ffee").touch()
    convert(conversion, folder, lambda count: None, [])
    assert sorted(path.name for path in folder.iterdir()) == [
        conversion.shard_name(0),
        "model.safetensors.index.json",
        "quantization.json",
    ]


def test_a_shard_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    tensors = {name: np.ones((8, 32), np.float32) for name in ("a.weight", "b.weight")}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    parts = [WeightPart((name,), (), (8, 32), False) for name in tensors]
    parameters = [Parameter("panels", (part,), 32, "w8a8") for part in parts]
    conversion = plan_conversion(
        open_checkpoint(source), parameters, "w8a8", biased=True, shard_bytes=1
    )
    written = []

    def killed(count: int) -> None:
        written.append(count)
        if len(written) == 2:
            raise SystemExit

    with pytest.raises(SystemExit):
        convert(conversion, folder, killed, [])
    first = folder / conversion.shard_name(0)
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    convert(conversion, folder, lambda count: None, [])
    assert first.read_bytes() == whole
