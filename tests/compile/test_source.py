"""Sources on disk: they come back as they were, and whatever was changed since is noticed."""

import json
from pathlib import Path

import pytest

from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.compile.source import INDEX, Source, is_whole, read_source

SOURCE = Source("template", ("run", "end"), "module {}\n", (("island0", "a\n"), ("island1", "b\n")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SOURCE.write(tmp_path, write_atomically)
    return tmp_path


def test_a_source_comes_back_as_it_was(folder: Path) -> None:
    assert read_source(folder) == SOURCE
    assert is_whole(folder)


@pytest.mark.parametrize("file", [*SOURCE.files(), INDEX])
def test_any_byte_changed_in_any_file_is_noticed(file: str, folder: Path) -> None:
    whole = (folder / file).read_bytes()
    for place in range(len(whole)):
        if whole[place : place + 1].isspace() and file == INDEX:
            continue  # how JSON is laid out does not count
        changed = bytearray(whole)
        changed[place] ^= 1
        (folder / file).write_bytes(changed)
        assert not is_whole(folder), place


@pytest.mark.parametrize("file", [*SOURCE.files(), INDEX])
def test_a_file_that_is_cut_short_or_gone_is_noticed(file: str, folder: Path) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:-2])
    assert not is_whole(folder)
    (folder / file).unlink()
    assert not is_whole(folder)
    with pytest.raises(OSError, match=file):
        read_source(folder, edited=True)


def test_edited_mlir_is_read_where_that_is_asked_for(folder: Path) -> None:
    (folder / "island1.mlir").write_text("mine\n")
    with pytest.raises(ValueError, match=r"island1\.mlir was changed after it was written"):
        read_source(folder)
    assert read_source(folder, edited=True).islands[1] == ("island1", "mine\n")


def test_an_edited_index_is_refused_all_the_same(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "symbols": ["other"]}))
    with pytest.raises(ValueError, match=r"index\.json was changed after it was written"):
        read_source(folder, edited=True)
