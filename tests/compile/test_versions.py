"""Keys change with what changes the result, and with nothing else."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.compile import versions
from buddy_pipeline.compile.target import named_target
from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.compile.versions import compiler_versions, plan_key, still_current
from tests.checkpoints import FAMILIES, tiny_config

F32 = VARIANTS["f32"]
TARGET = named_target("x86-64-v3")
CONFIG = tiny_config("llama")
KEY = plan_key(CONFIG, F32, TARGET)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "entries",
    [
        {"_name_or_path": "/elsewhere"},
        {"transformers_version": "4.0.0"},
        {"torch_dtype": "bfloat16"},
        {"dtype": "float16"},
        {"architectures": ["Other"]},
    ],
)
def test_entries_that_do_not_change_the_model_do_not_change_the_key(
    entries: dict[str, Any],
) -> None:
    assert plan_key({**CONFIG, **entries}, F32, TARGET) == KEY


def test_order_of_entries_does_not_change_the_key() -> None:
    assert plan_key(dict(reversed(CONFIG.items())), F32, TARGET) == KEY


@pytest.mark.parametrize(
    "entries",
    [
        {"hidden_size": 96},
        {"num_hidden_layers": 4},
        {"rms_norm_eps": 1e-5 * 3},
        {"tie_word_embeddings": True},
        {"rope_parameters": {**CONFIG["rope_parameters"], "factor": 8.0}},
        {"model_type": "mistral"},
        {"an_entry_of_tomorrow": 1},
    ],
)
def test_entries_that_may_change_the_model_change_the_key(entries: dict[str, Any]) -> None:
    assert plan_key({**CONFIG, **entries}, F32, TARGET) != KEY


def test_variant_and_cpu_change_the_key() -> None:
    others = [
        plan_key(CONFIG, VARIANTS["bf16"], TARGET),
        plan_key(CONFIG, F32, named_target("x86-64-v4")),
        plan_key(CONFIG, F32, replace(TARGET, features="+avx512bf16")),
    ]
    assert len({KEY, *others}) == 4


def test_every_family_has_a_key_of_its_own() -> None:
    assert len({plan_key(tiny_config(f), F32, TARGET) for f in FAMILIES}) == len(FAMILIES)


def digest_of(root: Path) -> str:
    program = "from buddy_pipeline.compile.versions import source_digest; print(source_digest())"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root), "PATH": ""},
    )
    return run.stdout.strip()


def test_every_source_file_that_decides_what_is_generated_counts(tmp_path: Path) -> None:
    package = tmp_path / "buddy_pipeline"
    for folder in ("compile", "partition"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, package / folder, ignore=ignored)
    seen = {digest_of(tmp_path)}
    deepest = [package / "compile/formats/bf16.py", package / "compile/kernels/linear.py"]
    for path in [*deepest, package / "partition/fragments.py", package / "compile/codegen.py"]:
        path.write_text(path.read_text() + "\n# changed\n")
        seen.add(digest_of(tmp_path))
    assert len(seen) == 5


def test_plans_stay_good_where_compilers_are_the_same_or_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_with = compiler_versions()
    assert {"torch", "torch-mlir", "llvmlite"} <= set(made_with)
    assert still_current(made_with)
    assert not still_current({**made_with, "torch": "1.0"})
    monkeypatch.setattr(versions, "installed", lambda package: None)
    assert still_current({**made_with, "torch": "1.0"})
    assert compiler_versions() == {}
