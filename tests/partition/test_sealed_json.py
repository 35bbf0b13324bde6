"""Sealed JSON: what is read back is what was written, or it is refused with the reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.partition.sealed_json import seal, unseal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
CONTENT = st.dictionaries(st.text().filter(lambda key: key not in ("format", "checksum")), VALUES)


@given(CONTENT, st.integers(0, 9), st.sampled_from([None, 1]))
def test_content_comes_back_however_it_is_laid_out(
    content: dict[str, Any], version: int, indent: int | None
) -> None:
    text = json.dumps(seal(version, content), indent=indent)
    assert unseal(version, text) == unseal(version, text.encode()) == content


@given(CONTENT, CONTENT)
def test_other_content_under_the_same_checksum_is_refused(
    content: dict[str, Any], other: dict[str, Any]
) -> None:
    text = json.dumps({**seal(1, content), **other})
    if json.dumps({**content, **other}, sort_keys=True) == json.dumps(content, sort_keys=True):
        assert unseal(1, text) == content
    else:
        with pytest.raises(ValueError, match="was changed after it was written"):
            unseal(1, text)


@pytest.mark.parametrize("data", [None, 3, "text", [], {}, {"format": 2}, seal(2, {})])
def test_another_version_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="is of another format version"):
        unseal(1, json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", '{"format": 1', b"\xff\xfe\x00", "[" * 100_000])
def test_text_that_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="is cut short or no JSON"):
        unseal(1, text)
