"""The plan as data: JSON and back, which partitions a rank runs, what crosses between ranks."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from buddy_pipeline.compile import manifest
from buddy_pipeline.compile.manifest import ROW_PAD, Constant, KvLayer, Plan, Value
from buddy_pipeline.partition.layers import BlockRole, block_role, layer_ranges
from tests.checkpoints import FAMILIES
from tests.compile.models import plan


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_survives_json(family: str) -> None:
    made = plan(family)
    back = Plan.from_json(made.to_json())
    assert back == made
    assert hash(back.partitions[1].parameters) == hash(made.partitions[1].parameters)


@pytest.mark.parametrize("version", [0, manifest.FORMAT_VERSION + 1])
def test_another_format_version_is_refused(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT_VERSION", version)
    text = plan("llama").to_json()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"plan"', "{}", '{"format": 1}'])
def test_text_that_is_no_plan_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(text)


def test_a_plan_cut_short_anywhere_is_a_value_error() -> None:
    text = plan("llama").to_json()
    for length in range(0, len(text) - 1, 97):
        with pytest.raises(ValueError):
            Plan.from_json(text[:length])


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all entries of nested JSON data."""
    children = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in children:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += _places(value, (*path, key))
    return found


@given(st.randoms(use_true_random=False), st.sampled_from(["remove", None, 7, [], {}, "text"]))
def test_a_plan_with_any_entry_removed_or_replaced_is_refused(random: Any, how: Any) -> None:
    data = json.loads(plan("gemma2").to_json())
    path = random.choice(_places(data))
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    assume(owner[path[-1]] != how)
    if how == "remove":
        del owner[path[-1]]
    else:
        owner[path[-1]] = how
    with pytest.raises(ValueError):
        Plan.from_json(json.dumps(data))


@given(st.integers(0, 12), st.integers(1, 8))
def test_ranks_run_every_partition_once_and_positions_everywhere(layers: int, world: int) -> None:
    made = _stretched(layers)
    ranges = layer_ranges(layers, world)
    ran: list[str] = []
    for rank in reversed(range(world)):
        units = [p.unit for p in made.for_rank(ranges[rank], block_role(rank, world))]
        assert units[0] == "positions"
        ran += units[1:]
    assert ran == ["prelude", *map(str, range(layers)), "postlude"]


def _stretched(layers: int) -> Plan:
    """The llama's plan with another number of layers, all like its first."""
    made = plan("llama")
    by_unit = {p.unit: p for p in made.partitions}
    middle = [replace(by_unit["0"], name=f"layer{i}", unit=str(i)) for i in range(layers)]
    partitions = (by_unit["positions"], by_unit["prelude"], *middle, by_unit["postlude"])
    return replace(made, layers=layers, partitions=partitions)


@pytest.mark.parametrize("family", FAMILIES)
def test_between_layers_only_the_hidden_state_crosses(family: str) -> None:
    made = plan(family)
    hidden = {"gpt2": 42, "gemma2": 45, "llama": 84, "qwen2": 60, "qwen3": 52, "mistral": 54}
    for boundary in range(made.layers + 1):
        (value,) = made.crossing(boundary)
        assert (value.elements, value.dtype) == (hidden[family], "f32")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_needs_the_objects_of_its_partitions_and_the_driver(family: str) -> None:
    made = plan(family)
    first = made.for_rank(range(0, 1), BlockRole.FIRST)
    last = made.for_rank(range(2, 3), BlockRole.LAST)
    for partitions in (first, last, first + last):
        keys = made.objects(partitions)
        assert keys[0] == made.driver and len(keys) == len(set(keys))
        assert set(keys[1:]) == {k for p in partitions for k in made.templates[p.template].objects}


@given(st.integers(1, 10_000), st.sampled_from(["f32", "i64"]))
def test_rows_are_padded_for_every_target(elements: int, dtype: str) -> None:
    value = Value("v", elements, dtype)
    assert value.stride % ROW_PAD == 0 and elements <= value.stride < elements + ROW_PAD
    assert value.row_bytes == value.stride * (8 if dtype == "i64" else 4)
    assert value.row_bytes % 64 == 0


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2), ("f16", 2)])
def test_elements_of_a_position_in_the_kv_cache(dtype: str, size: int) -> None:
    layer = KvLayer(heads=3, key=20, value=33, dtype=dtype)
    assert layer.element_bytes == size
    assert layer.value_stride == 48 and layer.position_elements == 3 * (20 + 48)


def test_constants_keep_their_bytes() -> None:
    made = plan("llama")
    for constant in made.constants.values():
        array = np.frombuffer(constant.bytes(), constant.dtype)
        assert array.size == np.prod(constant.shape)
    assert Constant("float32", (2,), "AACAPwAAAEA=").bytes() == np.float32([1, 2]).tobytes()
