"""The compile worker: a child process that plans models and builds objects.

It reads one JSON request a line on stdin and answers one JSON line on stdout; everything else goes
to stderr. The compilers live here because an internal error of theirs ends the process, and because
their memory should go when compiling is done.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.partition.errors import UserError

#: Address space that a worker may take: a pass that explodes, or a config.json with absurd sizes,
#: fails instead of swapping.
MEMORY_LIMIT = 12 << 30


def main() -> None:
    """Serves requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints must not land among the answers
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.RLIM_INFINITY))
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        try:
            answer: dict[str, Any] = {"ok": True, **_handle(request)}
        except UserError as error:
            answer = {"ok": False, "user_error": str(error)}
        except Exception as error:
            # The parent turns this into one message; nothing may escape and end the worker.
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answer["seconds"] = time.perf_counter() - started
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _handle(request: dict[str, Any]) -> dict[str, Any]:
    cache = Cache(Path(request["cache"]))
    target = Target(**request["target"])
    if request["kind"] == "plan":
        return _plan(cache, target, request)
    if request["kind"] == "verify":
        return _verify(request)
    return _build(cache, target, request["key"])


def _plan(cache: Cache, target: Target, request: dict[str, Any]) -> dict[str, Any]:
    """Plans a model; leaves its sources and then the plan in the cache."""
    from buddy_pipeline.compile.planner import make_plan
    from buddy_pipeline.compile.versions import compiler_versions

    plan, sources = make_plan(
        request["key"],
        request["config"],
        Variant(**request["variant"]),
        target,
        compiler_versions(),
    )
    for key, source in sources.items():
        folder = cache.source_folder(key)
        names = []
        cache.write(folder / f"{source.name}.mlir", source.module.encode())
        for symbol, text in source.islands:
            names.append({"symbol": symbol, "file": f"{symbol}.mlir"})
            cache.write(folder / f"{symbol}.mlir", text.encode())
        index = {"name": source.name, "symbol": source.symbol, "islands": names}
        cache.write(folder / "index.json", json.dumps(index).encode())
    cache.write(cache.plan_path(request["key"]), plan.to_json().encode())
    return {}


def _verify(request: dict[str, Any]) -> dict[str, Any]:
    """Checks the partitions of every rank against the model's whole graph."""
    from buddy_pipeline.compile.export import export_model
    from buddy_pipeline.partition.layers import block_role
    from buddy_pipeline.partition.ownership import block_partitions, partition_graph
    from buddy_pipeline.partition.verifier import verify

    nodes = export_model(request["config"]).nodes
    partitions = partition_graph(nodes)
    world = len(request["ranges"])
    by_rank = [
        block_partitions(partitions, range(*layers), block_role(rank, world))
        for rank, layers in enumerate(request["ranges"])
    ]
    return {"report": json.loads(verify(nodes, by_rank).to_json())}


def _build(cache: Cache, target: Target, key: str) -> dict[str, Any]:
    """Builds one object from its MLIR."""
    from buddy_pipeline.compile.codegen import compile_object
    from buddy_pipeline.compile.lowering import lower_island, lower_kernel

    folder = cache.source_folder(key)
    index = json.loads((folder / "index.json").read_text())
    modules = [lower_kernel((folder / f"{index['name']}.mlir").read_text())]
    for island in index["islands"]:
        text = (folder / island["file"]).read_text()
        modules.append(lower_island(text, island["symbol"]))
    payload = compile_object(modules, index["symbol"], target)
    cache.write_object(key, payload)
    return {"bytes": len(payload)}


if __name__ == "__main__":
    main()
