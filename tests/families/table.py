"""The README's table of families, made from the stored outcomes of the sweep."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.families.trial import Outcome, Status

README = Path(__file__).parents[2] / "README.md"
_BEGIN = "<!-- families: written by scripts/families -->\n"
_END = "<!-- end of families -->\n"

#: What a reason comes to in the table: the first pattern that is found in it.
_GROUPS: list[tuple[str, str]] = []


def with_table(readme: str, results: Mapping[str, Outcome]) -> str:
    """The README with its table as the results have it."""
    before, rest = readme.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}{table(results)}{_END}{after}"


def table(results: Mapping[str, Outcome]) -> str:
    """What passes, as a list, and what does not, by the reason."""
    passing = sorted(n for n, outcome in results.items() if outcome.status is Status.PASSES)
    others: dict[str, list[str]] = defaultdict(list)
    for name, outcome in sorted(results.items()):
        if outcome.status is not Status.PASSES:
            others[_group(outcome)].append(name)
    lines = [
        f"Of the {len(results)} model types that transformers has causal language models for,",
        f"these {len(passing)} pass: {', '.join(passing)}.",
        "",
        "| do not | why |",
        "| --- | --- |",
    ]
    for reason, names in sorted(others.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {', '.join(names)} | {reason} |")
    return "\n".join(lines) + "\n"


def _group(outcome: Outcome) -> str:
    for pattern, text in _GROUPS:
        if re.search(pattern, outcome.reason):
            return text
    return outcome.reason.replace("|", "\\|")
