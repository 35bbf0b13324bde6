import pytest

from buddy_pipeline.partition.counted import counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (-1, "-1 ranks")]
)
def test_a_noun_agrees_with_its_number(number: int, words: str) -> None:
    assert counted(number, "rank") == words


def test_a_plural_of_its_own_is_given() -> None:
    assert counted(1, "microbatch", "microbatches") == "1 microbatch"
    assert counted(3, "microbatch", "microbatches") == "3 microbatches"
