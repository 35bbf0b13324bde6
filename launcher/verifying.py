"""The `verify` command: the structural check of a split against the whole exported graph."""

import sys

from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.service import verify_split
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.building import plan_model
from buddy_pipeline.launcher.model import open_model
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.settings import VerifySettings
from buddy_pipeline.partition.layers import layer_ranges


def verify_command(settings: VerifySettings) -> int:
    """Writes the verifier's JSON report; exit code 0 if the partitions are exactly the graph."""
    if settings.report is not None:
        check_writable("--report", settings.report)
    model = open_model(settings)
    ranges = layer_ranges(model.layers, settings.world, settings.split)
    cache = Cache.open(None)
    plan, _ = plan_model(model, host_target(), cache, show=False)
    report = verify_split(plan, model.checkpoint.config["model_type"], ranges, cache)
    text = report.to_json() + "\n"
    if settings.report is None:
        sys.stdout.write(text)
    else:
        write_atomically(settings.report, text.encode())
        word = "every node once, in order" if report.ok else "violations found"
        print(f"{word}; report in {settings.report}", file=sys.stderr)
    return 0 if report.ok else 1
