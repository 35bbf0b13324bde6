"""A spec, a model and a cache in a folder, and the build commands on them."""

from pathlib import Path

import pytest

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.launcher import cli
from buddy_pipeline.launcher.model import Model
from buddy_pipeline.launcher.prebuilt import open_prebuilt
from buddy_pipeline.launcher.settings import PipelineSettings


class Project:
    """A spec, a model and a cache, and the commands on them."""

    def __init__(self, folder: Path, model: Path, cache: Path) -> None:
        self.folder, self.model, self.cache = folder, model, cache
        self.spec = folder / "spec.json"
        self.spec.write_text('{"max_token_len": 64}')
        self.build = folder / "build"
        self.config = self.build / "config.json"

    def run(self, command: str, *arguments: object) -> int:
        return cli.main([command, *map(str, arguments)])

    def gen_config(self, *arguments: object) -> int:
        model = ("--spec", self.spec, "--local-model", self.model)
        return self.run("gen-config", *model, "-o", self.config, *arguments)

    def import_model(self, *arguments: object) -> int:
        return self.run("import", "--config", self.config, "--cache-dir", self.cache, *arguments)

    def compile(self, *arguments: object) -> int:
        return self.run("compile", "--config", self.config, "--cache-dir", self.cache, *arguments)

    def open(self, bundle: Path | None = None) -> Model:
        """What rank 0 of 2 runs: the build directory, or its bundle in a folder."""
        settings = PipelineSettings(
            spec="", build_dir=None if bundle else self.build, bundle=bundle
        )
        return open_prebuilt(settings, 0, 2, Cache.open(self.cache))


def error(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line of a refused command."""
    printed = capsys.readouterr().err
    assert code == 2
    lines = [line for line in printed.splitlines() if line.startswith("buddy-pipeline: error: ")]
    assert len(lines) == 1 and "Traceback" not in printed
    return lines[0].removeprefix("buddy-pipeline: error: ")
