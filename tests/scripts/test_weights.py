"""What the weight benchmark says of memory and of files is so."""

from pathlib import Path

import numpy as np
import pytest
import weights

MEGABYTES = 1 << 20


def test_the_peak_is_memory_that_was_given_back_too() -> None:
    with weights._Peak() as peak:
        block = np.ones(64 * MEGABYTES, np.uint8)
        assert weights._own_memory() > 0  # while it is there
        peak._ended.wait(10 * weights._LOOK_S)
        del block
    assert 60 * MEGABYTES < peak.bytes < 100 * MEGABYTES


@pytest.mark.parametrize(
    ("change", "same"),
    [(None, True), (("a.bin", b"other"), False), (("c.bin", b"more"), False)],
)
def test_files_are_compared_by_name_and_content(
    change: tuple[str, bytes] | None, same: bool, tmp_path: Path
) -> None:
    for way in ("direct", "joined"):
        (tmp_path / way).mkdir()
        for name in ("a.bin", "b.bin"):
            (tmp_path / way / name).write_bytes(name.encode())
    if change is not None:
        (tmp_path / "joined" / change[0]).write_bytes(change[1])
    assert weights._same(tmp_path) == same
