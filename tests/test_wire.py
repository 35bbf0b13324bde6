"""Nothing from disk or another rank is unpickled, which would run whatever it says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("partition", "compile", "ranks", "launcher", "tests/mpi")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
#: mpi4py's methods in lower case pickle; `Send`, `Iallgather` and the like take buffers.
PICKLING = {
    *("send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv"),
    *("mprobe", "improbe", "bcast", "gather", "scatter", "allgather", "alltoall"),
    *("reduce", "allreduce", "scan", "exscan"),
}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def unpicklers(source: str) -> list[str]:
    """What a module calls or imports that would unpickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            owner = ast.unparse(node.func.value).split(".")[-1].lstrip("_").lower()
            if owner in ("comm", "comm_world") and node.func.attr in PICKLING:
                found.append(called)
            # NumPy's own default is False.
            words = [ast.unparse(keyword) for keyword in node.keywords]
            allows = any(w.startswith("allow_pickle=") and w != "allow_pickle=False" for w in words)
            if called == "torch.load" or (called == "np.load" and allows):
                found.append(called)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles(path: Path) -> None:
    assert unpicklers(path.read_text(encoding="utf-8")) == []


def test_unpickling_is_seen() -> None:
    source = """
import pickle
from dill import loads
world.comm.allgather(x)
self._comm.recv(source=0)
MPI.COMM_WORLD.bcast(1)
torch.load(path)
np.load(path, allow_pickle=True)
np.load(path, allow_pickle=False)
np.load(path)
comm.Iallgather(a, b)
torch.ops.aten.gather.default(x)
"""
    calls = ["MPI.COMM_WORLD.bcast", "np.load", "self._comm.recv", "torch.load"]
    assert sorted(unpicklers(source)) == sorted(
        [*calls, "dill", "pickle", "world.comm.allgather"],
    )
