"""Weights as kernels read them: every element where it belongs, whatever the file and format."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks import packing
from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint
from buddy_pipeline.ranks.packing import check_parameters, pack_parameters, packed_bytes

RNG = np.random.default_rng(0)
TENSORS = {
    "a.weight": RNG.standard_normal((70, 45), np.float32),
    "a.bias": RNG.standard_normal(70, np.float32),
    "b.weight": RNG.standard_normal((5, 45), np.float32),
    "turned.weight": RNG.standard_normal((45, 37), np.float32),
    "norm.weight": RNG.standard_normal(45, np.float32),
    "half.weight": RNG.standard_normal((33, 45)).astype(np.float16),
    "experts.rows": RNG.standard_normal((3, 37, 45), np.float32),
    "experts.turned": RNG.standard_normal((3, 45, 37), np.float32),
    "experts.half": RNG.standard_normal((3, 37, 45)).astype(np.float16),
    "experts.bias": RNG.standard_normal((3, 37), np.float32),
    "special.weight": np.float32([[np.nan, np.inf, -np.inf, -0.0, 1e-40, 3.4e38, 65504.0]]),
}


def write(path: Path, tensors: dict[str, np.ndarray]) -> Checkpoint:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "llama"}')
    return open_checkpoint(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("model"), TENSORS)


def part(name: str, bias: str = "", transposed: bool = False) -> WeightPart:
    shape = TENSORS[name].shape
    return WeightPart((name,), (bias,) if bias else (), shape, transposed)


def panels(*parts: WeightPart, panel: int = 32, form: str = "f32") -> Parameter:
    return Parameter("panels", parts, panel, form)


def packed(parameter: Parameter, checkpoint: Checkpoint) -> np.ndarray:
    return pack_parameters([parameter], checkpoint, 1)[parameter]


def unpacked(parameter: Parameter, data: np.ndarray) -> np.ndarray:
    """float32 [panels · panel, columns], element by element as the format's page says."""
    columns, width = parameter.parts[0].columns, parameter.panel
    if parameter.form == "f32":
        cells = data.view(np.float32).reshape(-1, columns, width)
        return cells.transpose(0, 2, 1).reshape(-1, columns)
    if parameter.form == "f16":
        cells = data.view(np.float16).reshape(-1, columns, width)
        return cells.transpose(0, 2, 1).reshape(-1, columns).astype(np.float32)
    pairs = -(-columns // 2)
    words = data.view(np.uint16).reshape(-1, pairs, width, 2).astype(np.uint32) << 16
    cells = words.view(np.float32).transpose(0, 2, 1, 3).reshape(-1, 2 * pairs)
    assert (cells[:, columns:] == 0).all()
    return cells[:, :columns]


TOLERANCE = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("panel", [16, 32])
@pytest.mark.parametrize("piece", [1, 45 * 32, 1 << 19])
def test_parts_lie_one_after_the_other_in_whole_panels(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, form: str, panel: int, piece: int
) -> None:
    """Also a part of fewer outputs than a panel, and pieces that end inside a part."""
    monkeypatch.setattr(packing, "_PIECE", piece)
    parts = [part("a.weight"), part("b.weight"), part("turned.weight", transposed=True)]
    parameter = panels(*parts, part("half.weight"), panel=panel, form=form)
    data = packed(parameter, checkpoint)
    assert data.nbytes == packed_bytes(parameter)
    rows, start = unpacked(parameter, data), 0
    for each in parameter.parts:
        weight = TENSORS[each.weight[0]].astype(np.float32)
        weight = weight.T if each.transposed else weight
        got = rows[start : start + len(weight)]
        assert (np.abs(got - weight) <= TOLERANCE[form] * np.abs(weight)).all()
        end = start + -(-len(weight) // panel) * panel
        assert (rows[start + len(weight) : end] == 0).all()
        start = end
    assert start == len(rows)


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("piece", [1, 45 * 32, 1 << 19])
def test_panels_of_parts_take_turns(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, form: str, piece: int
) -> None:
    """Two matrices, as gate and up, and their biases."""
    monkeypatch.setattr(packing, "_PIECE", piece)
    parts = (part("a.weight", "a.bias"), part("a.weight"))
    alone = packed(panels(parts[0], form=form), checkpoint).reshape(3, -1)
    data = packed(Parameter("panels", parts, 32, form, turns=2), checkpoint)
    assert (data.reshape(3, 2, -1) == alone[:, None]).all()
    biases = Parameter("panel_bias", parts, 32, turns=2)
    bias = packed(biases, checkpoint).view(np.float32).reshape(3, 2, 32)
    assert (bias[:, 0].reshape(-1)[:70] == TENSORS["a.bias"]).all()
    assert (bias[:, 0].reshape(-1)[70:] == 0).all() and (bias[:, 1] == 0).all()


@pytest.mark.parametrize("piece", [1, 45 * 32, 1 << 19])
def test_panels_of_parts_inside_matrices_take_turns(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Also where a part ends inside of a matrix, and in the middle of a piece."""
    monkeypatch.setattr(packing, "_PIECE", piece)
    parts = (part("a.weight"), part("b.weight"))
    in_order = packed(panels(*parts, panel=16), checkpoint).reshape(2, -1, 45 * 64)
    data = packed(Parameter("panels", parts, 16, turns=2), checkpoint)
    assert (data.reshape(-1, 2, 45 * 64) == in_order.swapaxes(0, 1)).all()


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("name", ["experts.rows", "experts.turned", "experts.half"])
def test_matrices_of_a_stack_lie_one_after_the_other_in_whole_panels(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, form: str, name: str
) -> None:
    monkeypatch.setattr(packing, "_PIECE", 1)
    parameter = panels(part(name, transposed=name == "experts.turned"), form=form)
    data = packed(parameter, checkpoint)
    assert data.nbytes == packed_bytes(parameter)
    rows = unpacked(parameter, data).reshape(3, 64, 45)
    stack = TENSORS[name].astype(np.float32)
    stack = stack.transpose(0, 2, 1) if name == "experts.turned" else stack
    assert (np.abs(rows[:, :37] - stack) <= TOLERANCE[form] * np.abs(stack)).all()
    assert (rows[:, 37:] == 0).all()


def test_biases_of_a_stack(checkpoint: Checkpoint) -> None:
    parts = (part("experts.rows", "experts.bias"),)
    check_parameters([Parameter("panel_bias", parts, 32)], checkpoint)
    bias = packed(Parameter("panel_bias", parts, 32), checkpoint).view(np.float32).reshape(3, 64)
    assert (bias[:, :37] == TENSORS["experts.bias"]).all() and (bias[:, 37:] == 0).all()


def test_halves_in_the_file_are_packed_as_they_are(checkpoint: Checkpoint) -> None:
    parameter = panels(part("half.weight"), form="f16")
    rows = unpacked(parameter, packed(parameter, checkpoint))
    assert (rows[:33] == TENSORS["half.weight"]).all()


def test_bf16_rounds_to_nearest_even_and_keeps_what_is_special(checkpoint: Checkpoint) -> None:
    parameter = panels(part("special.weight"), form="bf16")
    row = unpacked(parameter, packed(parameter, checkpoint))[0]
    assert np.isnan(row[0]) and row[1] == np.inf and row[2] == -np.inf
    assert row[3] == 0 and np.signbit(row[3])
    assert 0 < row[4] < 2e-40
    assert row[6] == 65536.0


def test_bf16_of_every_nan_is_nan_and_ties_go_to_even(tmp_path: Path) -> None:
    bits = np.uint32([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF])
    ties = np.uint32([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF])
    tensors = {"x": np.concatenate([bits, ties]).view(np.float32)[None]}
    parameter = panels(WeightPart(("x",), (), (1, 8), False), form="bf16")
    row = unpacked(parameter, packed(parameter, write(tmp_path, tensors)))[0]
    assert np.isnan(row[:4]).all()
    upper = row[4:].view(np.uint32) >> 16
    assert upper.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_number_beyond_f16_names_tensor_and_mend(tmp_path: Path, transposed: bool) -> None:
    """Infinity beside it, which f16 can hold, hides nothing."""
    values = np.ones((4, 4), np.float32)
    values[1, 2], values[3, 3] = 70000.0, np.inf
    model = write(tmp_path, {"big.weight": values})
    whole = WeightPart(("big.weight",), (), (4, 4), transposed)
    with pytest.raises(UserError, match=r"'big\.weight'.*f16.*bf16"):
        packed(panels(whole, form="f16"), model)
    values[1, 2] = 1.0
    folder = tmp_path / "infinite"
    folder.mkdir()
    parameter = panels(whole, form="f16")
    rows = unpacked(parameter, packed(parameter, write(folder, {"big.weight": values})))
    assert np.isinf(rows[3, 3]) and np.isfinite(rows).sum() == rows.size - 1


def test_biases_follow_the_panels_and_are_zero_where_a_part_has_none(
    checkpoint: Checkpoint,
) -> None:
    parts = (part("b.weight"), part("a.weight", "a.bias"), part("half.weight"))
    bias = packed(Parameter("panel_bias", parts, 32), checkpoint).view(np.float32)
    assert len(bias) == (1 + 3 + 2) * 32
    assert (bias[32 : 32 + 70] == TENSORS["a.bias"]).all()
    assert (bias[:32] == 0).all() and (bias[102:] == 0).all()


def test_plain_parameters_are_as_stored(checkpoint: Checkpoint) -> None:
    plain = Parameter("plain", (part("turned.weight"),), 0)
    data = packed(plain, checkpoint).view(np.float32)
    assert (data == TENSORS["turned.weight"].reshape(-1)).all()


def test_equal_parameters_share_memory_and_all_are_aligned(checkpoint: Checkpoint) -> None:
    """A tied head is the embedding's table: the same part, the same memory."""
    table, again = panels(part("a.weight")), panels(part("a.weight"))
    plain = Parameter("plain", (part("norm.weight"),), 0)
    memory = pack_parameters([table, plain, again], checkpoint, 2)
    assert len(memory) == 2 and memory[table] is memory[again]
    assert all(m.ctypes.data % 64 == 0 for m in memory.values())
    end = memory[table].ctypes.data + memory[table].nbytes
    assert 0 <= memory[plain].ctypes.data - end < 64


def test_of_alternative_names_the_first_that_exists_counts(checkpoint: Checkpoint) -> None:
    alias = WeightPart(("lm_head.weight", "b.weight"), (), (5, 45), False)
    rows = unpacked(panels(alias), packed(panels(alias), checkpoint))
    assert (rows[:5] == TENSORS["b.weight"]).all()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (WeightPart(("missing.weight",), (), (5, 45), False), r"missing\.weight"),
        (WeightPart(("b.weight",), (), (6, 45), False), r"b\.weight"),
        (WeightPart(("b.weight",), (), (45, 5), False), r"b\.weight"),
        (WeightPart(("a.weight",), ("missing.bias",), (70, 45), False), r"missing\.bias"),
        (WeightPart(("b.weight",), ("a.bias",), (5, 45), False), r"a\.bias"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_packed(
    checkpoint: Checkpoint, wrong: WeightPart, named: str
) -> None:
    good = panels(part("a.weight", "a.bias"))
    check_parameters([good], checkpoint)
    with pytest.raises(UserError, match=named):
        check_parameters([good, panels(wrong)], checkpoint)
