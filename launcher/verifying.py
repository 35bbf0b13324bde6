"""The `verify` command: a split against the whole exported graph, and logits against others'.

What is verified is a spec, or what lies in a build directory.
"""

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.directory_check import check_directory
from buddy_pipeline.compile.granularity import Granularity
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.service import CutGraph, ensure_plan
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.build_config import load_imported_config
from buddy_pipeline.launcher.model import Model, open_model, resolve_model
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.prebuilt import open_directory
from buddy_pipeline.launcher.settings import VerifySettings
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import layer_ranges
from buddy_pipeline.partition.strategies import layer_splitter
from buddy_pipeline.ranks.weight_manifest import check_weights


def verify_command(settings: VerifySettings) -> int:
    """Writes the JSON report; exit code 0 if the partitions are exactly the graph and, where that
    is asked for, logits are what they should be."""
    if settings.report is not None:
        check_writable("--report", settings.report)
    if settings.build_dir is None:
        layer_splitter(settings.strategy, "")  # before there is even a cache
    cache = Cache.open(settings.cache_dir)
    if settings.build_dir is not None:
        return _verify_directory(BuildDirectory(settings.build_dir), settings, cache)
    resolved = resolve_model(settings)  # only the logits need weights
    granularity = Granularity(settings.strategy)
    ranges = layer_ranges(resolved.layers, settings.world, settings.split)
    plan, _ = ensure_plan(
        resolved.config,
        resolved.formats,
        host_target(),
        cache,
        granularity,
        with_mlir=True,
    )
    family = str(resolved.config["model_type"])
    structure = CutGraph.read(plan, family, cache.graph_path(plan.key)).verify(ranges)
    report: dict[str, Any] = json.loads(structure.to_json())
    word = _structure_word(structure.ok)
    if settings.numeric:
        model = replace(open_model(settings), granularity=granularity)
        numeric, agrees = _numeric(model, settings, cache)
        report = {"ok": structure.ok and agrees, "structure": report, "numeric": numeric}
        word += _numeric_word(agrees)
    return _finish(settings, report, word)


def _verify_directory(directory: BuildDirectory, settings: VerifySettings, cache: Cache) -> int:
    """Verifies what lies in a build directory: graph, manifest, plan, MLIR, objects and packed
    weights, all of which are read."""
    config = load_imported_config(directory)
    manifest, plan = directory.read_manifest(), directory.read_plan()
    ranges = layer_ranges(plan.layers, manifest.world, manifest.split)
    cut = _read_graph(directory, plan, config.family)
    structure = cut.verify(ranges)
    files = check_directory(directory, manifest, plan, cut.nodes, cut.partitions, ranges)
    weights = check_weights(directory.weights)
    faults = (*files.faults, *weights.faults)
    report: dict[str, Any] = {
        "ok": structure.ok and not faults,
        "structure": json.loads(structure.to_json()),
        "files": {"ok": files.ok, **asdict(files)},
        "weights": {"ok": not weights.faults, **asdict(weights)},
    }
    word = _structure_word(structure.ok)
    word += f"; {faults[0]}" if faults else "; files are as they were written"
    if len(faults) > 1:
        word += f" (and {counted(len(faults) - 1, 'more fault')})"
    if settings.numeric and not faults:
        model = open_directory(directory, settings.local_model)
        report["numeric"], agrees = _numeric(model, settings, cache)
        report["ok"] = report["ok"] and agrees
        word += _numeric_word(agrees)
    return _finish(settings, report, word)


def _read_graph(directory: BuildDirectory, plan: Plan, family: str) -> CutGraph:
    """The directory's graph, cut; UserError if its file is not as it was imported."""
    try:
        return CutGraph.read(plan, family, directory.graph)
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except ValueError as error:
        why = str(error)
    raise UserError(f"{directory.graph} {why}: run 'buddy-pipeline import' again")


def _structure_word(ok: bool) -> str:
    return "every node once, in order" if ok else "violations found"


def _numeric_word(agrees: bool) -> str:
    return "; logits agree" if agrees else "; logits differ"


def _finish(settings: VerifySettings, report: dict[str, Any], word: str) -> int:
    """Writes the report where it goes, and what was found in a line; the exit code."""
    text = json.dumps(report, indent=2) + "\n"
    if settings.report is None:
        sys.stdout.write(text)
        if not report["ok"]:
            print(word, file=sys.stderr)
    else:
        write_atomically(settings.report, text.encode())
        print(f"{word}; report in {settings.report}", file=sys.stderr)
    return 0 if report["ok"] else 1


def _numeric(model: Model, settings: VerifySettings, cache: Cache) -> tuple[object, bool]:
    """The numeric report as JSON data, and whether it is as it should be."""
    from buddy_pipeline.launcher.numeric import compare
    from buddy_pipeline.launcher.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(model.checkpoint.tokenizer)
    prompts = {prompt: tokenizer.encode(prompt) for prompt in settings.numeric}
    for prompt, ids in prompts.items():
        if not ids:
            raise UserError(f"--prompt {prompt!r} has no tokens: give a text")
    report = compare(model, prompts, cache)
    return json.loads(report.to_json()), report.ok
