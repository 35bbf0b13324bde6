"""What the options ask for is known before it is allocated, and what would fit is said."""

import re

import pytest

from buddy_pipeline.launcher.limits import Asked, check_memory
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.step_memory import StepMemory

MOST = 65_536
RANK_0 = StepMemory(
    rank=0, world=2, token_bytes=20_000, row_bytes=200_000, input_bytes=2304, output_bytes=0
)
GIGABYTE = 10**9


def refusal(asked: Asked, available: int) -> str:
    with pytest.raises(UserError) as caught:
        check_memory(asked, RANK_0, available)
    return str(caught.value)


def mended(asked: Asked, message: str) -> Asked:
    """The options after what the message says."""
    values = dict(vars(asked))
    for option, before, after in re.findall(r"--([a-z-]+) (\d+) to (\d+)", message):
        assert values[option.replace("-", "_")] == int(before)
        values[option.replace("-", "_")] = int(after)
    assert values != vars(asked)
    return Asked(**values)


@pytest.mark.parametrize("available", [GIGABYTE, 20 * GIGABYTE, 300 * GIGABYTE])
@pytest.mark.parametrize(
    "asked",
    [
        Asked(MOST, MOST, MOST),
        Asked(MOST, None, None),
        Asked(16, None, MOST),
        Asked(16, MOST, MOST),
        Asked(1000, MOST, 1000),
    ],
)
def test_what_the_message_says_fits(asked: Asked, available: int) -> None:
    try:
        check_memory(asked, RANK_0, available)
    except UserError as error:
        check_memory(mended(asked, str(error)), RANK_0, available)


def test_the_option_that_takes_most_is_named_alone_if_that_suffices() -> None:
    message = refusal(Asked(MOST, 512, None), GIGABYTE)
    assert message.startswith("buffers for steps would take ")
    assert message.count("--") == 1
    assert "lower --max-sequences 65536 to " in message
    assert re.search(r"to \d\d?0*$", message)


def test_several_options_are_named_where_one_does_not_suffice() -> None:
    assert refusal(Asked(MOST, MOST, 2), GIGABYTE).count("--") == 2


def test_usual_options_take_little() -> None:
    check_memory(Asked(16, None, None), RANK_0, GIGABYTE)


def test_a_rank_without_memory_for_anything_says_so() -> None:
    message = refusal(Asked(1, None, None), 1000)
    assert message.startswith("the smallest buffers for steps take 0.0 GB")
