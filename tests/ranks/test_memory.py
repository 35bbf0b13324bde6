"""Peak memory grows by what is touched and does not fall again."""

import os
import subprocess
import sys

import numpy as np
import pytest

from buddy_pipeline.ranks.memory import peak_memory

MIB = 1 << 20


def test_memory_that_was_given_back_still_counts() -> None:
    before = peak_memory()
    block = np.ones(before + 16 * MIB, dtype=np.uint8)
    assert peak_memory() >= len(block)
    size = len(block)
    del block
    assert peak_memory() >= size


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux keeps VmHWM")
def test_the_peak_of_the_parent_does_not_count() -> None:
    block = np.ones(256 * MIB, dtype=np.uint8)
    code = "from buddy_pipeline.ranks.memory import peak_memory; print(peak_memory())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(child.stdout) < len(block)
