"""The hosts file: what it means, and every way to get it wrong named with its mend."""

import json
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.launcher.hosts import NETWORK, SHARED_MEMORY, read_hosts
from buddy_pipeline.partition.cost import Host, Link
from buddy_pipeline.partition.errors import UserError

HOST = {"memory_gb": 64, "bandwidth_gb_s": 40, "gflops": 500}


def written(folder: Path, content: Any) -> Path:
    path = folder / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_hosts_are_shared_by_their_ranks_from_rank_0_up(tmp_path: Path) -> None:
    big = {"name": "big", "ranks": 2, "memory_gb": 256, "bandwidth_gb_s": 200, "gflops": 3000}
    content = {
        "hosts": [big, {**HOST, "count": 2}],
        "link": {"latency_us": 10, "bandwidth_gb_s": 12},
    }
    cluster = read_hosts(written(tmp_path, content), world=4)
    half = Host("big", 128e9, 100e9, 1500e9)
    assert cluster.hosts == (half, half, *[Host("host 1", 64e9, 40e9, 500e9)] * 2)
    network = Link(10e-6, 12e9)
    # Rank 1 to rank 0 stays within "big"; rank 0 sends back to the last rank.
    assert cluster.links == (network, SHARED_MEMORY, network, network)


def test_all_ranks_on_one_host_need_no_network(tmp_path: Path) -> None:
    cluster = read_hosts(written(tmp_path, {"hosts": [{**HOST, "ranks": 3}]}), world=3)
    assert set(cluster.links) == {SHARED_MEMORY}


def test_a_thousand_like_hosts_are_one_entry(tmp_path: Path) -> None:
    cluster = read_hosts(written(tmp_path, {"hosts": [{**HOST, "count": 1024}]}), world=1024)
    assert len(cluster.hosts) == 1024
    assert set(cluster.links) == {NETWORK}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON: .* at line 1, column 2"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hosts": [], "hosts": []}', "gives the key 'hosts' twice: keep one"),
        ([], r"is \[\]: it must be an object with hosts"),
        ({}, "lacks the key 'hosts': add it"),
        ({"hosts": []}, r"hosts is \[\]: it must be a list of one host or more"),
        ({"hosts": [HOST], "lnik": {}}, "unknown key 'lnik': did you mean 'link'"),
        ({"hosts": [HOST, 3]}, r"hosts\[1\] is 3: it must be an object with memory_gb"),
        ({"hosts": [{**HOST, "gflop": 1}]}, r"hosts\[0\]: unknown key 'gflop': did you mean 'gfl"),
        ({"hosts": [{"memory_gb": 1, "gflops": 1}]}, r"hosts\[0\] lacks the key 'bandwidth_gb_s'"),
        ({"hosts": [{**HOST, "gflops": 0}]}, "gflops is 0: it must be a number above 0"),
        ({"hosts": [{**HOST, "gflops": True}]}, "gflops is True: it must be a number above 0"),
        ('{"hosts": [{"memory_gb": Infinity}]}', "memory_gb is inf: it must be a number above 0"),
        ({"hosts": [{**HOST, "ranks": 1.5}]}, "ranks is 1.5: it must be a whole number from 1"),
        ({"hosts": [{**HOST, "name": ""}]}, "name is '': it must be a printable text"),
        ({"hosts": [{**HOST, "name": "\ud800"}]}, "it must be a printable text that is not empty"),
        (
            '{"hosts": [{"ranks": 1' + "0" * 400 + "}]}",
            "it must be a whole number from 1 to 1,000,0",
        ),
        ('{"hosts": 1' + "0" * 5000 + "}", "is not valid JSON: Exceeds the limit"),
        ({"hosts": [HOST], "link": {"latency_us": 1}}, "link lacks the key 'bandwidth_gb_s'"),
        ({"hosts": [HOST]}, "has 1 rank, but --world is 2: mend count and ranks"),
        ({"hosts": [{**HOST, "count": 10**9}]}, "has more than 2 ranks, but --world is 2"),
        ({"hosts": [{**HOST, "ranks": 10**9}]}, "has more than 2 ranks, but --world is 2"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UserError, match=rf"^hosts file {path}.*{message}"):
        read_hosts(path, world=2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.json cannot be read \(No such file or directory\)"):
        read_hosts(tmp_path / "none.json", world=2)
