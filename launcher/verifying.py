"""The `verify` command: a split against the whole exported graph, and logits against others'."""

import json
import sys
from dataclasses import replace

from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.granularity import Granularity
from buddy_pipeline.compile.service import ensure_plan, verify_split
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.model import Model, open_model, resolve_model
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.settings import VerifySettings
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import layer_ranges
from buddy_pipeline.partition.strategies import layer_splitter


def verify_command(settings: VerifySettings) -> int:
    """Writes the JSON report; exit code 0 if the partitions are exactly the graph and, where that
    is asked for, logits are what they should be."""
    if settings.report is not None:
        check_writable("--report", settings.report)
    layer_splitter(settings.strategy, "")  # before anything is compiled
    resolved = resolve_model(settings)  # only the logits need weights
    granularity = Granularity(settings.strategy)
    ranges = layer_ranges(resolved.layers, settings.world, settings.split)
    cache = Cache.open(settings.cache_dir)
    plan, _ = ensure_plan(
        resolved.config,
        resolved.formats,
        host_target(),
        cache,
        granularity,
        with_mlir=True,
    )
    structure = verify_split(plan, resolved.config["model_type"], ranges, cache)
    report, ok = json.loads(structure.to_json()), structure.ok
    word = "every node once, in order" if structure.ok else "violations found"
    if settings.numeric:
        model = replace(open_model(settings), granularity=granularity)
        numeric, agrees = _numeric(model, settings, cache)
        report, ok = {"ok": ok and agrees, "structure": report, "numeric": numeric}, ok and agrees
        word += "; logits agree" if agrees else "; logits differ"
    text = json.dumps(report, indent=2) + "\n"
    if settings.report is None:
        sys.stdout.write(text)
    else:
        write_atomically(settings.report, text.encode())
        print(f"{word}; report in {settings.report}", file=sys.stderr)
    return 0 if ok else 1


def _numeric(model: Model, settings: VerifySettings, cache: Cache) -> tuple[object, bool]:
    """The numeric report as JSON data, and whether it is as it should be."""
    from buddy_pipeline.launcher.numeric import compare
    from buddy_pipeline.launcher.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(model.checkpoint.tokenizer)
    prompts = {prompt: tokenizer.encode(prompt) for prompt in settings.numeric}
    for prompt, ids in prompts.items():
        if not ids:
            raise UserError(f"--prompt {prompt!r} has no tokens: give a text")
    report = compare(model, settings.strategy, prompts, cache)
    return json.loads(report.to_json()), report.ok
