"""The `run` command: rank 0 answers a prompt, the other ranks compute for it."""

import sys

from buddy_pipeline.launcher.answer import answer
from buddy_pipeline.launcher.output import write_json
from buddy_pipeline.launcher.session import open_session
from buddy_pipeline.launcher.settings import RunSettings


def run_command(settings: RunSettings) -> int:
    """Runs on every rank and returns its exit code."""
    with open_session(settings) as session:
        if session.engine is None:
            session.serve()
            return 0
        result = answer(session.engine, session.tokenizer, settings, session.sampler)
    if settings.stats:
        print(result.stats.line(), file=sys.stderr)
    if settings.json_path is not None:
        write_json(settings.json_path, result)
    return 0
