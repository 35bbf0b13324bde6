"""The book of the KV cache agrees with what its changes do to one, and never gives out too much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.slots import MOST_CHANGES, Slots, _common_prefix, kv_tiers

TIERS = (32, 64, 128)


class Book:
    """Slots and a model of a rank's cache: which tokens lie in each slot."""

    def __init__(self, slots: int = 4, positions: int = 512) -> None:
        self.slots = Slots(slots, TIERS, positions)
        self.memory: list[list[int]] = [[] for _ in range(slots)]
        self.capacity = [0] * slots
        self.positions = positions

    def apply(self) -> None:
        changes = self.slots.take_changes()
        assert len(changes) <= MOST_CHANGES * len(self.capacity)
        for slot, capacity, source, positions in changes:
            assert positions <= len(self.memory[source])
            self.memory[slot] = self.memory[source][:positions]
            self.capacity[slot] = capacity
        assert sum(self.capacity) == self.positions - self.slots.positions_left <= self.positions

    def run(self, sequence: Sequence) -> None:
        """Send all that is pending."""
        self.apply()
        assert sequence.slot is not None
        memory = self.memory[sequence.slot]
        del memory[sequence.sent :]
        memory += sequence.ids[sequence.sent :]
        sequence.sent = sequence.settled = len(sequence.ids)
        assert memory == sequence.ids
        assert len(memory) <= self.capacity[sequence.slot]


def sequence(*ids: int) -> Sequence:
    return Sequence(list(ids), lambda logits, history: 0)


def admitted(book: Book, *ids: int) -> Sequence:
    result = sequence(*ids)
    assert book.slots.admit(result)
    book.run(result)
    return result


@pytest.mark.parametrize(
    ("context", "sizes", "tiers"),
    [
        (2048, None, (256, 512, 1024, 2048)),
        (2000, None, (256, 512, 1024, 2016)),
        (100, None, (128,)),
        (100, (), (128,)),
        (2048, (512, 64, 4096), (64, 512, 2048)),
        (2048, (33, 40), (64, 2048)),
    ],
)
def test_tiers_are_whole_blocks_up_to_the_context(
    context: int, sizes: tuple[int, ...] | None, tiers: tuple[int, ...]
) -> None:
    assert kv_tiers(context, sizes) == tiers


def test_a_slot_starts_in_the_smallest_tier_that_fits_and_moves_up() -> None:
    book = Book()
    one = admitted(book, *range(20))
    assert book.capacity[one.slot or 0] == 32
    while len(one.ids) < 128:
        one.ids.append(7)
        if book.slots.is_full(one):
            assert book.slots.grow(one)
        book.run(one)
    assert book.capacity[one.slot or 0] == 128


def test_the_prefix_of_a_running_sequence_is_copied() -> None:
    book = Book()
    admitted(book, *range(60))
    second = sequence(*range(50), 99)
    assert book.slots.admit(second)
    assert (second.sent, second.reused) == (50, 50)
    book.run(second)


def test_what_the_microbatch_in_the_making_computes_is_waited_for() -> None:
    book = Book()
    first = sequence(*range(60))
    assert book.slots.admit(first)
    first.sent = 60
    second = sequence(*range(50), 99)
    for first.settled in (0, 20):
        assert not book.slots.admit(second)
    first.settled = 60
    assert book.slots.admit(second)
    assert second.sent == 50


def test_little_of_the_microbatch_in_the_making_is_not_waited_for() -> None:
    book = Book()
    first = sequence(*range(60))
    assert book.slots.admit(first)
    first.settled, first.sent = 40, 60
    second = sequence(*range(50), 99)
    assert book.slots.admit(second)
    assert second.sent == 40


def test_the_last_token_of_a_prompt_is_always_left_to_run() -> None:
    book = Book()
    admitted(book, *range(60))
    second = sequence(*range(60))
    assert book.slots.admit(second)
    assert second.sent == 59


def test_a_finished_sequence_that_is_a_whole_prefix_gives_its_slot_without_a_copy() -> None:
    book = Book()
    first = admitted(book, *range(40))
    slot = first.slot
    book.slots.retire(first)
    second = sequence(*range(40), 1, 2)
    assert book.slots.admit(second)
    assert second.slot == slot
    assert book.slots.changes == []
    book.run(second)


def test_a_short_common_prefix_is_not_worth_a_copy() -> None:
    book = Book()
    admitted(book, *range(60))
    second = sequence(*range(31), 99)
    assert book.slots.admit(second)
    assert second.sent == 0


def test_a_finished_sequence_gives_way_to_one_that_needs_its_memory() -> None:
    book = Book(positions=128)
    first = admitted(book, *range(100))
    assert not book.slots.admit(sequence(5))
    book.slots.retire(first)
    admitted(book, *range(500, 600))


def test_a_prefix_is_taken_over_where_there_is_no_room_for_a_copy() -> None:
    book = Book(positions=128)
    first = admitted(book, *range(100))
    book.slots.retire(first)
    second = admitted(book, *range(50), 7)
    assert second.reused == 50


def test_an_evicted_sequence_starts_again() -> None:
    book = Book(positions=128)
    first = admitted(book, *range(100))
    book.slots.evict(first)
    assert (first.slot, first.sent) == (None, 0)
    assert book.slots.positions_left == 128
    assert book.slots.admit(first)
    book.run(first)


actions = st.lists(
    st.tuples(
        st.sampled_from(["admit", "token", "token", "retire", "evict"]),
        st.integers(0, 7),
        st.integers(1, 120),
    ),
    max_size=80,
)


@given(actions=actions, slots=st.integers(1, 5), positions=st.sampled_from([128, 200, 400]))
def test_whatever_happens_a_slot_holds_its_sequence(
    actions: list[tuple[str, int, int]], slots: int, positions: int
) -> None:
    book = Book(slots, positions)
    running: list[Sequence] = []
    for action, which, length in actions:
        if action == "admit":
            new = sequence(*range(length), *[1000 + which] * (128 - length > which))
            if book.slots.admit(new):
                running.append(new)
                book.run(new)
        elif running:
            chosen = running[which % len(running)]
            if action == "token" and len(chosen.ids) < 128:
                if not book.slots.is_full(chosen) or book.slots.grow(chosen):
                    chosen.ids.append(which)
                    book.run(chosen)
            elif action == "retire":
                running.remove(chosen)
                book.slots.retire(chosen)
            elif action == "evict":
                running.remove(chosen)
                book.slots.evict(chosen)
            book.apply()


@given(common=st.integers(0, 300), extra=st.integers(0, 100), limit=st.integers(0, 300))
def test_the_common_prefix_is_found_exactly(common: int, extra: int, limit: int) -> None:
    a = [*range(common), *[-1] * extra]
    b = [*range(common), *[-2] * extra]
    limit = min(limit, len(a))
    expected = min(common, limit)
    assert _common_prefix(a, b, limit) == expected
