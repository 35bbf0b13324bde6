"""What the build commands say of what they have done, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from buddy_pipeline.partition.counted import counted

if TYPE_CHECKING:
    from buddy_pipeline.compile.object_builder import Built
    from buddy_pipeline.launcher.stages import Imported
    from buddy_pipeline.ranks.weight_files import Exported


def imported_line(imported: Imported) -> str:
    """How an import came about, what it has made, and how long it took."""
    times, counts = imported.times, imported.manifest.counts
    how = (
        f"exported in {times.export:.2f} s and imported in {times.imports:.2f} s"
        f" ({times.total:.2f} s with starting the compilers)"
        if times.total
        else "plan from the cache"
    )
    return (
        f"{how}: {counts['prefill']} prefill and {counted(counts['decode'], 'decode partition')} of"
        f" {counted(counts['templates'], 'template')}; files in {imported.writing:.2f} s"
    )


def weights_line(done: Exported) -> str:
    """What an export of weights has written and found."""
    return (
        f"{done.bytes / 1e6:.0f} MB of weights: {counted(len(done.written), 'file')} written and"
        f" {len(done.reused)} reused in {done.seconds:.2f} s"
    )


def object_line(built: Built) -> str:
    """Where an object has come from."""
    how = "from the cache" if built.from_cache else f"built in {built.seconds:.2f} s"
    return f"{built.name}: {how}"


def compiled_line(built: Sequence[Built], seconds: float) -> str:
    """How many objects a compile has built and found."""
    fresh = sum(not item.from_cache for item in built)
    return f"{counted(fresh, 'object')} built, {len(built) - fresh} from the cache: {seconds:.2f} s"
