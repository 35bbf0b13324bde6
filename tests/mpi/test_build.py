"""Ranks that build one directory together: nothing is done twice, and it is as one process's."""

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from buddy_pipeline.ranks.weight_manifest import MANIFEST as WEIGHTS_MANIFEST
from tests.e2e.command import COMMAND, answer, buddy_pipeline, refusal
from tests.jobs import Ended
from tests.mpi.job import MPIRUN, needs_mpi

pytestmark = [pytest.mark.mpi, needs_mpi]

#: Notes every file that a process, or one that it starts, puts in place. All of ours are written
#: beside and renamed.
_RECORDER = """
import os, sys
def note(event, given):
    if event == "os.rename":
        with open({log!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{os.fspath(given[1])}}\\n")
sys.addaudithook(note)
if os.environ.get("HOST_OF_EACH_RANK"):
    import socket
    name = f"host{{os.environ.get('PMI_RANK')}}"
    socket.gethostname = lambda: name
"""


class Built:
    """The build commands in a folder, with a cache of its own, and what they wrote."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir()
        self.folder, self.cache, self.root = folder, folder / "cache", folder / "build"
        self.log = folder / "log"
        (folder / "sitecustomize.py").write_text(_RECORDER.format(log=str(self.log)))
        self.spec = folder.parent / "spec.json"  # the same for all: its path is in config.json
        self.spec.write_text('{"max_token_len": 64}')
        self.model = ("--spec", self.spec, "--local-model", model)

    def run(self, *arguments: object, ranks: int = 1) -> Ended:
        ended = buddy_pipeline(*arguments, ranks=ranks, cache=self.cache, env=self._environment())
        assert ended.code == 0, ended.stderr
        return ended

    def on_two_hosts(self, arguments: Sequence[object], *of_each: Sequence[object]) -> Ended:
        """The command on two ranks that think themselves on hosts of their own, each with some
        arguments of its own."""
        first, second = (["-n", 1, COMMAND, *arguments, *own] for own in of_each)
        env = {**self._environment(), "HOST_OF_EACH_RANK": "yes"}
        ended = buddy_pipeline(command=[MPIRUN, *first, ":", *second], env=env)
        assert ended.code == 0, ended.stderr
        return ended

    def _environment(self) -> dict[str, str]:
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def build(self, *arguments: object, ranks: int = 1) -> Ended:
        return self.run("build", *self.model, "--build-dir", self.root, *arguments, ranks=ranks)

    def written(self, folder: Path) -> Counter[str]:
        """How often each file below a folder was put in place, but those by which ranks meet."""
        lines = self.log.read_text().splitlines()
        paths = (Path(line.split(" ", 1)[1]) for line in lines)
        stay = [path for path in paths if not path.name.startswith(".team-")]
        return Counter(str(path.relative_to(folder)) for path in stay if folder in path.parents)

    def files(self) -> dict[str, bytes]:
        """What is in the build directory, but for the times of weight files."""
        return dict(_contents(self.root))


def _contents(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == WEIGHTS_MANIFEST:
            found = json.loads(data)
            files = {name: {**f, "mtime_ns": 0} for name, f in found["files"].items()}
            data = json.dumps([found["source"], files]).encode()
        yield str(path.relative_to(root)), data


@pytest.fixture
def make(tmp_path: Path, checkpoint: Callable[..., Path]) -> Callable[[str], Built]:
    return lambda name: Built(tmp_path / name, checkpoint("qwen2", num_hidden_layers=4))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_share_a_build_and_do_nothing_twice(world: int, make: Callable[[str], Built]) -> None:
    together, one = make("together"), make("one")
    report = together.folder / "times.json"
    together.build("--debug-wrappers", "--time-report", report, ranks=world)
    one.build("--debug-wrappers", "--world", world)
    assert together.files() == one.files()

    cached = together.written(together.cache)
    assert set(cached.values()) == {1}
    assert sum(name.startswith("objects/") for name in cached) >= 6
    assert sum(name.startswith("plans/") for name in cached) == 2  # a plan and its graph
    in_place = together.written(together.root)
    twice = {name for name, times in in_place.items() if times > 1}
    assert twice == {"partition_manifest.json"}  # of the import, then with objects
    objects = json.loads(report.read_text())["objects"]
    names = [item["name"] for item in objects]
    assert len(names) == len(set(names)) == sum(n.startswith("objects/") for n in cached)
    assert not any(item["from_cache"] and item["rank"] == 0 for item in objects)
    assert len({item["rank"] for item in objects}) == world


@pytest.mark.slow
def test_stages_of_several_ranks_give_what_a_build_gives(make: Callable[[str], Built]) -> None:
    stages, one = make("stages"), make("one")
    config = stages.root / "config.json"
    for rank_command in (
        ["gen-config", *stages.model, "-o", config],
        ["import", "--config", config, "--cache-dir", stages.cache],
        ["compile", "--config", config, "--cache-dir", stages.cache],
    ):
        ended = buddy_pipeline(*rank_command, ranks=2)
        assert ended.code == 0, ended.stderr
        assert len(ended.stdout.splitlines()) == len(set(ended.stdout.splitlines()))
    one.build("--world", 2)
    assert stages.files() == one.files()
    ask = ["--prompt", "One, two", "--max-tokens", 4, "--ignore-eos"]
    answers = [
        answer(built.folder / "out.json", "--build-dir", built.root, *ask, ranks=2)["token_ids"]
        for built in (stages, one)
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_second_build_finds_everything(make: Callable[[str], Built]) -> None:
    built = make("built")
    built.build(ranks=2)
    before = built.files()
    built.log.unlink()
    built.build(ranks=2)
    assert built.files() == before
    assert not built.written(built.cache)
    assert not built.written(built.root)


def test_a_cold_start_of_several_ranks_does_nothing_twice(make: Callable[[str], Built]) -> None:
    built = make("built")
    built.run(*built.model, "--prompt", "Hi", "--max-tokens", 1, ranks=2)
    cached = built.written(built.cache)
    assert set(cached.values()) == {1}
    assert sum(name.startswith("objects/") for name in cached) >= 6


@pytest.mark.slow
def test_every_rank_compiles_its_own_share_into_the_cache(make: Callable[[str], Built]) -> None:
    built = make("built")
    ended = built.run("compile", *built.model, ranks=2)
    shares = sorted(line for line in ended.stdout.splitlines() if line.startswith("rank "))
    assert [line.split(",")[0] for line in shares] == ["rank 0 of 2 (LAST)", "rank 1 of 2 (FIRST)"]
    assert set(built.written(built.cache).values()) == {1}


def test_hosts_that_share_a_directory_but_no_cache_build_it_together(
    make: Callable[[str], Built],
) -> None:
    together, one = make("together"), make("one")
    caches = [together.folder / "cache0", together.folder / "cache1"]
    build = ["build", *together.model, "--build-dir", together.root]
    together.on_two_hosts(build, *(["--cache-dir", cache] for cache in caches))
    one.build("--world", 2)
    assert together.files() == one.files()
    twice = {name for name, times in together.written(together.root).items() if times > 1}
    assert twice == {"partition_manifest.json"}
    objects = [{path.name for path in (cache / "objects").iterdir()} for cache in caches]
    assert objects[0] and objects[1] and not objects[0] & objects[1]
    assert not list((caches[1] / "plans").iterdir())  # who does not lead exports nothing


@pytest.mark.slow
def test_hosts_with_a_directory_each_build_and_run_their_own_ranks(
    make: Callable[[str], Built],
) -> None:
    built, one = make("built"), make("one")
    roots = [["--build-dir", built.folder / name] for name in ("build0", "build1")]
    cache = ["--cache-dir", built.cache]
    built.on_two_hosts(["build", *built.model, *cache], *roots)
    assert set(built.written(built.cache).values()) == {1}
    for rank, (_, root) in enumerate(roots):
        manifest = json.loads((Path(str(root)) / "partition_manifest.json").read_text())
        assert manifest["ranks"] == [rank] and manifest["world"] == 2
    ask = ["--prompt", "One, two", "--max-tokens", 4, "--ignore-eos"]
    out = built.folder / "out.json"
    built.on_two_hosts(["run", *ask, "--json", out, *cache], *roots)
    expected = answer(one.folder / "out.json", *one.model, *ask, cache=one.cache)
    assert json.loads(out.read_text())["token_ids"] == expected["token_ids"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names two CPUs of x86-64")
def test_ranks_with_different_cpus_get_code_for_theirs(make: Callable[[str], Built]) -> None:
    built = make("built")
    same = [*built.model, "--build-dir", built.root, "--skip-weights", "--cache-dir", built.cache]
    first = [COMMAND, "build", *same, "--target-cpu", "x86-64-v3", ":", "-n", 1]
    ended = buddy_pipeline("build", *same, command=[MPIRUN, "-n", 1, *first, COMMAND])
    assert ended.code == 0, ended.stderr
    folders = sorted(path.name for path in built.root.iterdir())
    assert len(folders) == 2 and any("x86-64-v3" in name for name in folders)
    for folder, (rank, layer) in zip(
        sorted(built.root.iterdir(), key=lambda path: "v3" not in path.name),
        [(0, "layer3"), (1, "layer0")],
        strict=True,
    ):
        manifest = json.loads((folder / "partition_manifest.json").read_text())
        assert manifest["ranks"] == [rank]
        assert layer in [entry["name"] for entry in manifest["partitions"]]
        assert all((folder / "objects" / entry["file"]).exists() for entry in manifest["objects"])


def test_mistakes_on_several_ranks_are_one_line(make: Callable[[str], Built]) -> None:
    built = make("built")
    build = ["build", *built.model, "--build-dir", built.root]
    line = refusal(buddy_pipeline(*build, "--world", 3, ranks=2, cache=built.cache))
    assert "--world 3 is not the 2 ranks that were started" in line
    line = refusal(buddy_pipeline(*build, "--split", "9,1", ranks=2, cache=built.cache))
    assert "9,1" in line
    blocked = built.folder / "file"
    blocked.write_text("")
    build = ["build", *built.model, "--build-dir", blocked / "build"]
    line = refusal(buddy_pipeline(*build, ranks=2, cache=built.cache))
    assert f"build directory '{blocked / 'build'}' cannot be written" in line


def test_ranks_that_were_started_for_different_things_say_so(make: Callable[[str], Built]) -> None:
    built = make("built")
    config = built.root / "config.json"
    assert buddy_pipeline("gen-config", *built.model, "-o", config).code == 0
    build = [COMMAND, "build", *built.model, "--build-dir", built.root, ":", "-n", 1, COMMAND]
    ended = buddy_pipeline("compile", "--config", config, command=[MPIRUN, "-n", 1, *build])
    line = "rank 0 was started to build and rank 1 to compile: give all ranks of an mpirun the same"
    assert refusal(ended).startswith(line)
