"""The hosts file: what the machines of a pipeline can do, for `plan`.

A JSON object:

    {
      "hosts": [
        {"name": "big",   "ranks": 2, "memory_gb": 256, "bandwidth_gb_s": 200, "gflops": 3000},
        {"name": "small", "count": 3, "memory_gb": 64,  "bandwidth_gb_s": 40,  "gflops": 500}
      ],
      "link": {"latency_us": 25, "bandwidth_gb_s": 1.2}
    }

Hosts are listed from rank 0 up. `count` (1) says how many like this follow each other, `ranks` (1)
how many ranks each runs, which share its memory, its bandwidth and its floating-point operations.
`link` is the network between hosts; ranks of one host pass messages through memory. 1 GB is 10^9
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buddy_pipeline.launcher.json_keys import Kind, check_entries, is_count
from buddy_pipeline.launcher.json_text import read_json
from buddy_pipeline.partition.cost import Host, Link
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError

#: Between ranks of one host, as measured with MPICH's shared memory: 6 µs for a short message.
SHARED_MEMORY = Link(latency=6e-6, bandwidth=5e9)
#: Ethernet of 10 Gbit/s, for hosts files without a link.
NETWORK = Link(latency=25e-6, bandwidth=1.2e9)
_GB = 1e9
_MOST = 10**9  # more hosts or ranks than there are, and few enough to divide by


@dataclass(frozen=True)
class Cluster:
    """The ranks' shares of their hosts, and the links between neighbours."""

    hosts: tuple[Host, ...]
    """By rank."""
    links: tuple[Link, ...]
    """By rank, from it to the next lower one; rank 0's leads to the last."""


def like_hosts(host: Host, world: int) -> Cluster:
    """`world` hosts like this one, one rank each."""
    return Cluster((host,) * world, (NETWORK,) * world)


def read_hosts(path: Path, world: int) -> Cluster:
    """The cluster that a hosts file describes.

    Raises UserError if the file cannot be read, has an unknown or missing key or a value that
    cannot be, or has not `world` ranks.
    """
    where = f"hosts file {path}"
    content = read_json(where, path)
    check_entries(where, content, _FILE, required=("hosts",))
    entries = content["hosts"]
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{where}: hosts is {entries!r}: it must be a list of one host or more")
    network = _link(where, content.get("link"))
    hosts: list[Host] = []
    numbers: list[int] = []  # of each rank's host
    for position, entry in enumerate(entries):
        inside = f"{where}: hosts[{position}]"
        check_entries(inside, entry, _HOST, required=("memory_gb", "bandwidth_gb_s", "gflops"))
        ranks = entry.get("ranks", 1)
        share = Host(
            name=entry.get("name", f"host {position}"),
            memory=entry["memory_gb"] * _GB / ranks,
            bandwidth=entry["bandwidth_gb_s"] * _GB / ranks,
            flops=entry["gflops"] * 1e9 / ranks,
        )
        for _ in range(entry.get("count", 1)):
            number = numbers[-1] + 1 if numbers else 0
            placed = min(ranks, world + 1 - len(hosts))  # one too many says as much as a million
            hosts += [share] * placed
            numbers += [number] * placed
            if len(hosts) > world:
                break
    if len(hosts) != world:
        most = counted(min(len(hosts), world), "rank")
        have = f"more than {most}" if len(hosts) > world else most
        raise UserError(
            f"{where} has {have}, but --world is {world}: "
            "mend count and ranks of its hosts, or --world"
        )
    links = tuple(
        SHARED_MEMORY if numbers[rank] == numbers[rank - 1] else network for rank in range(world)
    )
    return Cluster(tuple(hosts), links)


def _link(where: str, entry: Any) -> Link:
    if entry is None:
        return NETWORK
    check_entries(f"{where}: link", entry, _LINK, required=tuple(_LINK))
    return Link(entry["latency_us"] / 1e6, entry["bandwidth_gb_s"] * _GB)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_number(value: Any) -> bool:
    # Infinity and NaN, which Python's JSON reads, are refused by the upper end.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15


_ANY = Kind("anything", lambda value: True)  # checked by what reads it
_TEXT = Kind("a printable text that is not empty", _is_name)
_NUMBER = Kind("a number above 0", _is_number)
_COUNT = Kind(f"a whole number from 1 to {_MOST:,}", lambda value: is_count(value, 1, _MOST))
_FILE = {"hosts": _ANY, "link": _ANY}
_LINK = {"latency_us": _NUMBER, "bandwidth_gb_s": _NUMBER}
_HOST = {
    "name": _TEXT,
    "count": _COUNT,
    "ranks": _COUNT,
    "memory_gb": _NUMBER,
    "bandwidth_gb_s": _NUMBER,
    "gflops": _NUMBER,
}
