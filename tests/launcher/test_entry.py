"""The first moments of the command."""

import signal
import subprocess
import sys

INTERRUPTED_WHILE_IMPORTING = """
import signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "buddy_pipeline.launcher.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from buddy_pipeline.launcher.entry import main
main()
"""


def test_an_interrupt_while_the_command_line_is_imported_ends_in_silence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTING], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
