"""A bundle made here for another CPU runs there, with no compiler stack.

`scripts/emulated-python DIR` makes the other machine; EMULATED_PYTHON=DIR/python names it. Beside
it is a bundle for a smaller CPU of this architecture, which runs here and now.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import answer, buddy_pipeline, refusal
from tests.jobs import ROOT

MAIN = ("-c", "import sys; from buddy_pipeline.launcher.entry import main; sys.exit(main())")


def python_for(target: str) -> str:
    """The interpreter of a machine that runs the target's code; skips the test without one."""
    if not target.startswith(("aarch64", "neoverse")):
        return sys.executable
    name = os.environ.get("EMULATED_PYTHON", "")
    if shutil.which(name) is None:
        pytest.skip("needs an AArch64 Python: scripts/emulated-python DIR, and EMULATED_PYTHON")
    return name


CASES = [
    pytest.param(
        target,
        variant,
        id=f"{target}-{variant}",
        marks=[] if (target, variant) == ("x86-64-v3", "f32") else pytest.mark.slow,
    )
    for target in ("x86-64-v3", "aarch64", "neoverse-n1")
    for variant in ("f32", "bf16", "w8a8")
]


@pytest.mark.parametrize(("target", "variant"), CASES)
def test_a_bundle_gives_there_what_the_model_gives_here(
    target: str,
    variant: str,
    checkpoint: Callable[..., Path],
    cache: Path,
    tmp_path: Path,
) -> None:
    python = python_for(target)
    spec, build, bundles = (tmp_path / name for name in ("spec.json", "build", "bundles"))
    spec.write_text(json.dumps({"hf_model_path": str(checkpoint("llama")), "variant": variant}))
    ask = ("--prompt", "Hello", "--max-tokens", 6, "--threads", 2)
    here = answer(tmp_path / "here.json", "--spec", spec, *ask, cache=cache)

    where = ("--build-dir", build)
    made = buddy_pipeline("build", "--spec", spec, *where, "--target-cpu", target, cache=cache)
    assert made.code == 0, made.stderr
    assert buddy_pipeline("pack", *where, "-o", bundles).code == 0
    run = ("run", "--bundle", bundles / "rank0-of-1.zip", *ask)
    paths = {"PYTHONPATH": str(ROOT / ".mypy")}
    there = answer(tmp_path / "there.json", *run, env=paths, command=(python, *MAIN))
    assert there["token_ids"] == here["token_ids"]


@pytest.mark.slow
def test_the_other_machine_refuses_a_bundle_for_this_one(
    checkpoint: Callable[..., Path], cache: Path, tmp_path: Path
) -> None:
    python = python_for("aarch64")
    spec, build, bundles = (tmp_path / name for name in ("spec.json", "build", "bundles"))
    spec.write_text(json.dumps({"hf_model_path": str(checkpoint("llama"))}))
    target = ("--target-cpu", "x86-64-v3")
    assert (
        buddy_pipeline("build", "--spec", spec, "--build-dir", build, *target, cache=cache).code
        == 0
    )
    assert buddy_pipeline("pack", "--build-dir", build, "-o", bundles).code == 0
    run = ("run", "--bundle", bundles / "rank0-of-1.zip", "--prompt", "Hello")
    paths = {"PYTHONPATH": str(ROOT / ".mypy")}
    line = refusal(buddy_pipeline(*run, env=paths, command=(python, *MAIN)))
    assert "x86-64-v3" in line and "aarch64" in line
