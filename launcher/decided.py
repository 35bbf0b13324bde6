"""Options that cannot be given where what is built has decided them."""

from collections.abc import Mapping
from pathlib import Path

from buddy_pipeline.partition.errors import UserError


def check_undecided(options: Mapping[str, object], source: str, where: Path) -> None:
    """Raises UserError for an option, by name, that has a value although `source`, such as
    "--build-dir", says at `where` what it would say."""
    for option, value in options.items():
        if value:
            raise UserError(
                f"{option}{'' if value is True else f' {value}'} cannot change what is already"
                f" built in {source} {where}: leave it out, or build with it"
            )
