"""The sweep: every causal language model class that transformers knows, each in a process.

    python -m tests.families.sweep [--again] [--table] [TYPE …]

Tries the model types named, or those that have no result yet; `--again` all of them, `--table`
none. Results are kept in `docs/families.json` as they come; in the end the README's table is
written anew.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

from tests.families.table import README, with_table
from tests.families.trial import Outcome, Status, main

RESULTS = README.parent / "docs" / "families.json"
TIME_LIMIT_S = 240.0
"""Of one trial; compiling on a busy machine is the most of it."""

_MEDIA = "models of text and other media"
_OUTSIDE = {
    **dict.fromkeys(["dots3_note", "fuyu", "git", "mllama", "phi4_multimodal"], _MEDIA),
    **dict.fromkeys(["moshi", "musicgen", "musicgen_melody"], "models of audio codes"),
    "blt": "a model of patches of bytes",
    "gemma4_assistant": "a head that drafts for another model",
    "gemma4_unified_assistant": "a head that drafts for another model",
}
"""Classes in transformers' list that are no decoder-only language models."""


def read_results() -> dict[str, Outcome]:
    """The stored outcomes by model type."""
    if not RESULTS.exists():
        return {}
    stored = json.loads(RESULTS.read_text())["families"]
    return {name: Outcome.from_json(data) for name, data in stored.items()}


def known_families() -> dict[str, str]:
    """The class of each model type that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def try_apart(model_type: str, folder: Path, cache: Path) -> Outcome:
    """The trial in a process of its own, with a time limit; a compiler's abort is an outcome.

    Processes are forked from one that has loaded the packages.
    """
    outside = _OUTSIDE.get(model_type)
    if known_families()[model_type].endswith("ForConditionalGeneration"):
        outside = _MEDIA
    if outside is not None:
        return Outcome(Status.OUTSIDE, outside)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "transformers", "torch_mlir.fx"])
    process = processes.Process(target=main, args=(model_type, folder, cache))
    process.start()
    process.join(TIME_LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome(Status.FAILED, f"takes more than {TIME_LIMIT_S:.0f} s")
    try:
        return Outcome.from_json(json.loads((folder / "outcome.json").read_text()))
    except FileNotFoundError:
        lines = (folder / "log.txt").read_text().strip().splitlines()
        last = lines[-1][:160] if lines else "no output"
        return Outcome(Status.FAILED, f"the process ended with {process.exitcode}: {last}")


def _store(results: dict[str, Outcome]) -> None:
    data = {
        "transformers": importlib.metadata.version("transformers"),
        "families": {name: results[name].to_json() for name in sorted(results)},
    }
    temporary = RESULTS.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(RESULTS)


def run(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="families")
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep checkpoints, logs and objects here")
    options = parser.parse_args(arguments)
    results, known = read_results(), known_families()
    results = {name: outcome for name, outcome in results.items() if name in known}
    wanted = options.types or [n for n in known if options.again or n not in results]
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        for number, name in enumerate([] if options.table else wanted, 1):
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "outcome.json").unlink(missing_ok=True)
            results[name] = try_apart(name, folder, root / "cache")
            _store(results)
            outcome = results[name]
            print(f"{number}/{len(wanted)} {name}: {outcome.status.value} {outcome.reason}")
            sys.stdout.flush()
    README.write_text(with_table(README.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
