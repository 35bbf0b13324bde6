"""How much memory this process has used at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """Peak resident memory of this process so far, bytes.

    Linux: `VmHWM` of /proc/self/status (proc_pid_status(5)), which starts anew at exec; `ru_maxrss`
    does not, and would count the peak of the shell or launcher that this process was started from.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2) counts in bytes on macOS, in KiB on every other system.
    return used if sys.platform == "darwin" else used * 1024
