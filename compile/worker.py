"""The compile worker: a child process that plans models and builds objects.

It reads one JSON request a line on stdin and answers one JSON line on stdout, before which there
may be lines with a `note`; everything else goes to stderr. The compilers live here because an
internal error of theirs ends the process, and because their memory should go when compiling is
done. With the argument `loaded` it loads what building objects needs before it is asked.
"""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.compile.source import Source, is_whole, read_source
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph_file import graph_to_json

#: Address space that a worker may take: a pass that explodes, or a config.json with absurd sizes,
#: fails instead of swapping.
MEMORY_LIMIT = 12 << 30

Note = Callable[[dict[str, Any]], None]
"""Says something before the answer."""


def main() -> None:
    """Serves requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints must not land among the answers
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.RLIM_INFINITY))

    def say(words: dict[str, Any]) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    if sys.argv[1:] == ["loaded"]:
        _load_object_compilers()
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        try:
            answer: dict[str, Any] = {"ok": True, **handle(request, lambda n: say({"note": n}))}
        except UserError as error:
            answer = {"ok": False, "user_error": str(error)}
        except Exception as error:
            # The parent turns this into one message; nothing may escape and end the worker.
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.perf_counter() - started
        say(answer)


def _load_object_compilers() -> None:
    from buddy_pipeline.compile.codegen import initialise
    from buddy_pipeline.compile.lowering import lower_kernel

    lower_kernel("module {}")
    initialise()


def handle(request: dict[str, Any], note: Note) -> dict[str, Any]:
    """Does what one request asks (see `service`) and leaves the result in the cache; the answer."""
    cache = Cache(Path(request["cache"]))
    target = Target(**request["target"])
    if request["kind"] == "plan":
        return _plan(cache, target, request, note)
    return _build(cache, target, request["key"])


def _plan(cache: Cache, target: Target, request: dict[str, Any], note: Note) -> dict[str, Any]:
    """Plans a model; leaves its sources, its graph and then the plan in the cache. `note` gets a
    unit and the keys of its objects once their sources are there."""
    started = time.perf_counter()
    gc.disable()  # nothing of what loading and tracing make goes before the process does
    import torch

    from buddy_pipeline.compile.export import export_model
    from buddy_pipeline.compile.planner import make_plan
    from buddy_pipeline.compile.versions import compiler_versions

    key, config = request["key"], request["config"]
    granularity = Granularity(request["strategy"], Sharing(request["sharing"]))
    torch.fx.config.do_not_emit_stack_traces = True  # a fifth of the time of tracing
    imported = time.perf_counter()
    model = export_model(config)
    exported = time.perf_counter()
    versions = compiler_versions()
    variant = Variant(**request["variant"])
    written: set[str] = set()

    def write(sources: Mapping[str, Source]) -> None:
        for source_key in sources.keys() - written:
            if not is_whole(cache.source_folder(source_key)):
                sources[source_key].write(cache.source_folder(source_key), cache.write)
            written.add(source_key)

    def ready(unit: str, sources: Mapping[str, Source]) -> None:
        write(sources)
        note({"unit": unit, "objects": list(sources)})

    planned = make_plan(key, model, config, variant, granularity, target, versions, ready)
    write(planned.sources)
    cache.write(cache.graph_path(key), graph_to_json(model.nodes).encode())
    cache.write(cache.plan_path(key), planned.plan.to_json().encode())
    return {
        "packages": imported - started,
        "export": exported - imported,
        "import": time.perf_counter() - exported,
    }


def _build(cache: Cache, target: Target, key: str) -> dict[str, Any]:
    """Builds one object from its MLIR."""
    from buddy_pipeline.compile.codegen import compile_object
    from buddy_pipeline.compile.lowering import lower_island, lower_kernel

    source = read_source(cache.source_folder(key))
    modules = [lower_kernel(source.module)]
    modules += [lower_island(text, symbol) for symbol, text in source.islands]
    payload = compile_object(modules, source.symbols, target)
    cache.write_object(key, payload)
    return {"bytes": len(payload)}


if __name__ == "__main__":
    main()
