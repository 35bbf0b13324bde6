"""Targets: names, tile shapes that fit the registers, and digests that tell them apart."""

from dataclasses import fields, replace

import llvmlite.binding as llvm
import pytest

from buddy_pipeline.compile.codegen import target_machine
from buddy_pipeline.compile.formats import FORMATS, WeightFormat
from buddy_pipeline.compile.formats.base import MATRIX_ROWS, panels_for, tile_rows
from buddy_pipeline.compile.manifest import KV_BLOCK, ROW_PAD
from buddy_pipeline.compile.target import Target, host_target, named_target
from buddy_pipeline.partition.errors import UserError

NAMES = ["x86-64-v4", "x86-64-v3", "aarch64", "riscv64", "host"]
on_each_target = pytest.mark.parametrize("target", [named_target(n) for n in NAMES], ids=NAMES)


def test_the_host_has_three_names() -> None:
    assert named_target("host") == named_target("native") == named_target("") == host_target()


@pytest.mark.parametrize("name", ["x86-64-v2", "znver9", "HOST", "aarch64 "])
def test_a_name_that_is_not_known_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(UserError) as error:
        named_target(name)
    assert f"'{name}'" in str(error.value) and "x86-64-v3" in str(error.value)


@on_each_target
def test_llvm_knows_the_cpu(target: Target) -> None:
    machine = target_machine(target)
    assert machine.triple.split("-")[0] == target.triple.split("-")[0]


@on_each_target
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_tiles_fit_the_registers(target: Target, form: WeightFormat) -> None:
    """Accumulators with their temporaries, the weights of each column, and what all share."""
    use, vectors = form.registers(target), target.panel_vectors
    most = tile_rows(target, form)
    if use.matrix:  # tiles have registers of their own
        assert most == 2 * MATRIX_ROWS
        return
    shapes = [(most, 1), *((rows, panels_for(target, form, rows)) for rows in range(1, most + 1))]
    for rows, panels in shapes:
        assert rows >= 1 and panels >= 1
        each = vectors * (rows * (1 + use.temporaries) + use.panel)
        # The smallest tile there is may not fit; no other exceeds the registers.
        assert panels * each + use.shared <= target.registers or (rows, panels) == (1, 1)


@on_each_target
def test_panels_fill_whole_padded_rows(target: Target) -> None:
    assert target.panel == target.panel_vectors * target.lanes
    assert ROW_PAD % target.panel == 0 and KV_BLOCK % target.lanes == 0


def test_every_field_is_part_of_the_digest() -> None:
    base = named_target("x86-64-v3")
    digests = {base.digest()}
    for field in fields(Target):
        value = getattr(base, field.name)
        other = not value if isinstance(value, bool) else value * 2 or "+avx2"
        digests.add(replace(base, **{field.name: other}).digest())
    assert len(digests) == 1 + len(fields(Target))


def test_a_host_without_the_vectors_kernels_need_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Features(dict[str, bool]):
        def flatten(self) -> str:
            return ""

    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "core2")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: Features(sse2=True))
    with pytest.raises(UserError, match="core2"):
        host_target.__wrapped__()
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "s390x-ibm-linux")
    with pytest.raises(UserError, match="s390x"):
        host_target.__wrapped__()
