"""Targets: names, tile shapes that fit the registers, and digests that tell them apart."""

import platform
from dataclasses import fields, replace

import llvmlite.binding as llvm
import pytest

from buddy_pipeline.compile import host_features
from buddy_pipeline.compile import target as target_module
from buddy_pipeline.compile.codegen import target_machine
from buddy_pipeline.compile.custom_target import custom_target
from buddy_pipeline.compile.formats import FORMATS, WeightFormat
from buddy_pipeline.compile.formats.base import MATRIX_ROWS, tile_rows
from buddy_pipeline.compile.manifest import KV_BLOCK, ROW_PAD
from buddy_pipeline.compile.target import Target, check_runs_here, host_target, named_target
from buddy_pipeline.partition.errors import UserError

NAMES = ["x86-64-v4", "x86-64-v3", "aarch64", "riscv64", "host"]
on_each_target = pytest.mark.parametrize("target", [named_target(n) for n in NAMES], ids=NAMES)


def test_the_host_has_two_names() -> None:
    assert named_target("host") == named_target("native") == host_target()


@pytest.mark.parametrize("name", ["x86-64-v2", "znver9", "HOST", "aarch64 ", ""])
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
    needed = vectors * (most * (1 + use.temporaries) + use.panel) + use.shared
    assert needed <= target.registers or most == 1  # the smallest tile there is may not fit


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


def stand_on(monkeypatch: pytest.MonkeyPatch, triple: str, cpu: str, **features: bool) -> None:
    """Makes this process believe that it runs on another CPU."""
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr(llvm, "get_process_triple", lambda: triple)
    monkeypatch.setattr(target_module, "host_features", lambda: features)
    monkeypatch.setattr(target_module, "host_target", host_target.__wrapped__)


def test_a_host_without_the_vectors_kernels_need_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_on(monkeypatch, "x86_64-unknown-linux-gnu", "core2", sse2=True)
    with pytest.raises(UserError, match="core2"):
        target_module.host_target()
    stand_on(monkeypatch, "riscv64-unknown-linux-gnu", "sifive-u74", m=True, d=True)
    with pytest.raises(UserError, match=r"sifive-u74.*no vectors"):
        target_module.host_target()
    stand_on(monkeypatch, "s390x-ibm-linux", "z14")
    with pytest.raises(UserError, match="s390x"):
        target_module.host_target()


ARM_FEATURES = dict.fromkeys(
    ["aes", "crc", "dotprod", "fp-armv8", "fullfp16", "lse", "neon", "rcpc", "rdm", "sha2"], True
)


def test_code_for_a_level_runs_on_later_cpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    arm, older = "aarch64-unknown-linux-gnu", {"fp-armv8": True, "neon": True, "dotprod": False}
    stand_on(monkeypatch, arm, "neoverse-v1", **ARM_FEATURES)
    assert target_module.host_target().int8_dot == "sdot"
    check_runs_here(named_target("neoverse-n1"), "it")
    check_runs_here(named_target("aarch64"), "it")
    stand_on(monkeypatch, arm, "cortex-a72", **older)
    assert target_module.host_target().int8_dot == ""
    check_runs_here(named_target("aarch64"), "it")
    with pytest.raises(UserError, match=r"neoverse-n1.*cortex-a72.*lacks aes, crc, dotprod"):
        check_runs_here(named_target("neoverse-n1"), "it")
    with pytest.raises(UserError, match=r"x86-64-v3.*cortex-a72"):
        check_runs_here(named_target("x86-64-v3"), "it")


def test_a_host_with_risc_v_vectors_runs_code_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("m", "a", "f", "d", "v", "zfhmin", "zvfhmin")
    stand_on(monkeypatch, "riscv64-unknown-linux-gnu", "rva23", **dict.fromkeys(names, True))
    assert target_module.host_target().vector_bits == 128
    check_runs_here(named_target("riscv64"), "it")


def test_linux_says_what_llvm_does_not_know_of_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit 20 of its capabilities is the dot product of bytes, bit 22 (SVE) none of ours."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"lse": True, "sve": True})
    monkeypatch.setattr(host_features, "_capabilities", lambda: 1 << 20 | 1 << 22 | 0b11)
    found = host_features.host_features()
    assert found["dotprod"] and found["neon"] and found["sve"] and not found["lse"]
    assert "+dotprod" in host_features.flattened(found).split(",")


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "dot", "pairs", "tiles"),
    [
        ("x86_64-linux-gnu", "sapphirerapids", "", "vpdpbusd", True, True),
        ("x86_64-linux-gnu", "znver4", "", "vpdpbusd", True, False),
        ("x86_64-linux-gnu", "x86-64-v4", "+avx512vnni", "vpdpbusd", False, False),
        ("x86_64-linux-gnu", "alderlake", "", "vpdpbusd", False, False),
        ("x86_64-linux-gnu", "haswell", "", "pmaddubsw", False, False),
        ("aarch64-linux-gnu", "neoverse-v2", "", "sdot", False, False),
        ("aarch64-linux-gnu", "cortex-a72", "", "", False, False),
        ("aarch64-linux-gnu", "generic", "+dotprod", "sdot", False, False),
        ("riscv64-linux-gnu", "generic-rv64", "+v", "", False, False),
    ],
)
def test_a_cpu_by_name_has_what_its_name_means(
    triple: str, cpu: str, features: str, dot: str, pairs: bool, tiles: bool
) -> None:
    target = custom_target(triple, cpu, features)
    assert (target.int8_dot, target.bf16_dot, target.bf16_tiles) == (dot, pairs, tiles)


@pytest.mark.parametrize(
    ("triple", "cpu", "features", "why"),
    [
        ("x86_64-linux-gnu", "nehalem", "", "neither AVX-512 nor AVX2"),
        ("riscv64-linux-gnu", "generic-rv64", "", "no vectors"),
        ("aarch64-linux-gnu", "nonsense", "", "not a recognized processor"),
        ("x86_64-linux-gnu", "znver4", "avx2", "begins with"),
        ("nowhere", "generic", "", "triple"),
        ("mips-linux-gnu", "generic", "", "x86_64, aarch64 and riscv64"),
    ],
)
def test_what_has_no_kernels_is_one_line(triple: str, cpu: str, features: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as error:
        custom_target(triple, cpu, features)
    assert f"'{cpu}'" in str(error.value) and "\n" not in str(error.value)
