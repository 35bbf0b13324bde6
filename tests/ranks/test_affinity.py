"""Ranks of one host divide its cores, and threads never outnumber a rank's share."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.ranks import affinity
from buddy_pipeline.ranks.affinity import CoreShare, core_share, prepare_threads, threads_for
from buddy_pipeline.ranks.world import World


def world(cores: CoreShare, local_size: int = 2) -> World:
    return World(0, local_size, 0, tuple(range(local_size)), "host", None, cores)


@given(cores=st.integers(1, 64), ranks=st.integers(1, 64))
def test_unbound_ranks_divide_the_cores(cores: int, ranks: int) -> None:
    shares = [core_share([frozenset(range(cores))] * ranks, rank) for rank in range(ranks)]
    if ranks > cores:
        assert shares == [CoreShare(tuple(range(cores)), exclusive=False)] * ranks
        return
    assert [core for share in shares for core in share.cores] == list(range(cores))
    sizes = [len(share.cores) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert all(share.exclusive for share in shares)


def test_a_rank_that_its_launcher_bound_keeps_its_cores() -> None:
    bound = [frozenset({0, 1}), frozenset({2, 3}), frozenset({2, 3})]
    assert core_share(bound, 0) == CoreShare((0, 1), exclusive=True)
    assert core_share(bound, 2) == CoreShare((3,), exclusive=True)


@pytest.mark.parametrize(
    ("requested", "exclusive", "threads"),
    [(None, True, 4), (3, True, 3), (9, True, 4), (None, False, 1), (4, False, 1)],
)
def test_threads_stay_within_the_share(
    requested: int | None, exclusive: bool, threads: int
) -> None:
    assert threads_for(world(CoreShare((4, 5, 6, 7), exclusive)), requested) == threads


@pytest.fixture
def bound_to(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The core sets that the process was bound to, without binding the test process."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        affinity.os, "sched_setaffinity", lambda _, cores: calls.append(tuple(cores)), raising=False
    )
    return calls


def test_a_rank_with_cores_of_its_own_is_bound_to_them(bound_to: list[tuple[int, ...]]) -> None:
    environ: dict[str, str] = {}
    prepare_threads(world(CoreShare((2, 3), exclusive=True)), 2, environ)
    assert bound_to == [(2, 3)]
    assert environ["KMP_BLOCKTIME"] == "50"
    assert "compact" in environ["KMP_AFFINITY"]


def test_a_rank_on_shared_cores_is_left_to_the_system(bound_to: list[tuple[int, ...]]) -> None:
    environ: dict[str, str] = {}
    prepare_threads(world(CoreShare((0, 1), exclusive=False), local_size=4), 1, environ)
    assert bound_to == []
    assert environ == {"KMP_BLOCKTIME": "0", "KMP_AFFINITY": "nowarnings,none"}


def test_a_single_rank_stays_where_the_user_put_it(bound_to: list[tuple[int, ...]]) -> None:
    prepare_threads(world(CoreShare((0, 1), exclusive=True), local_size=1), 2, {})
    assert bound_to == []


@pytest.mark.parametrize("variable", ["KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"])
def test_what_the_user_set_stays(bound_to: list[tuple[int, ...]], variable: str) -> None:
    environ = {variable: "mine", "KMP_BLOCKTIME": "7"}
    prepare_threads(world(CoreShare((0, 1), exclusive=True)), 2, environ)
    assert environ == {variable: "mine", "KMP_BLOCKTIME": "7"}


def test_available_cores_are_those_of_the_process() -> None:
    if hasattr(os, "sched_getaffinity"):
        assert affinity.available_cores() == os.sched_getaffinity(0)
