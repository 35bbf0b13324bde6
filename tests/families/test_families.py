"""Families of models: the stored results hold, and the README says what they say."""

from pathlib import Path

import pytest

from tests.families.sweep import known_families, read_results, try_apart
from tests.families.table import README, with_table
from tests.families.trial import Status

#: Tried in every run; each stands for many.
FEW = ["olmo2", "gpt_neox", "bart"]


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that trials share: many families have kernels of the same shapes."""
    return tmp_path_factory.mktemp("objects")


def test_the_table_in_the_readme_is_that_of_the_results() -> None:
    readme = README.read_text()
    assert with_table(readme, read_results()) == readme, "run scripts/families --table"


@pytest.mark.slow
def test_every_class_of_transformers_has_a_result() -> None:
    assert set(read_results()) == set(known_families()), "run scripts/families"


@pytest.mark.parametrize(
    "family",
    [
        *FEW,
        *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(read_results()) if n not in FEW),
    ],
)
def test_a_family_does_what_its_result_says(family: str, tmp_path: Path, objects: Path) -> None:
    outcome = try_apart(family, tmp_path, objects)
    stored = read_results()[family]
    assert outcome.status is stored.status, outcome.reason
    if stored.status is Status.REFUSED:
        assert outcome.reason == stored.reason
