"""Records between ranks: they come back as they were, and what is none is refused."""

from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from buddy_pipeline.ranks.exchange import decode, encode
from buddy_pipeline.ranks.measuring import BlockTimes
from buddy_pipeline.ranks.messages import ProtocolError
from buddy_pipeline.ranks.profile_report import RankProfile
from tests.ranks.profiles import two_ranks


def test_a_profile_comes_back_as_it_was() -> None:
    for profile in two_ranks():
        back = decode(encode(profile), RankProfile)
        np.testing.assert_equal(astuple(back), astuple(profile))
        assert type(back.spans[0]) is type(profile.spans[0])


def test_times_of_layers_keep_their_numbers() -> None:
    times = BlockTimes({3: 1.5, 10: 2.0}, 0.25)
    assert decode(encode(times), BlockTimes) == times


@pytest.mark.parametrize(
    "record",
    [b"", b"\xc1", encode(7), encode({"layers": {"x": 1.0}, "rest": 0.0}), encode({"rest": 0.0})],
    ids=["nothing", "no MessagePack", "a number", "a layer that is no number", "a field too few"],
)
def test_what_is_no_record_of_the_type_is_refused(record: bytes) -> None:
    with pytest.raises(ProtocolError, match="BlockTimes"):
        decode(record, BlockTimes)


@pytest.mark.parametrize("array", [[[2, 2], bytes(8)], [[2]], [["x"], bytes(16)], 3])
def test_an_array_whose_size_is_not_its_shape_is_refused(array: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(encode([array]), list[np.ndarray])
