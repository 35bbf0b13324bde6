"""The README's table of families, made from the stored outcomes of the sweep."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.families.trial import Outcome, Status

README = Path(__file__).parents[2] / "README.md"
_BEGIN = "<!-- families: written by scripts/families -->\n"
_LONGEST = 160  # characters of a reason
_END = "<!-- end of families -->\n"

#: What a reason comes to in the table: the first pattern that is found in it.
_GROUPS = [
    (r"grouped_mm|topk", "a router to experts is torch-mlir's, which cannot import it"),
    (
        r"convolution over|recurrent state|carries|TracingCache",
        "layers carry a state between tokens",
    ),
    (r"an indexer", "an indexer chooses the keys that attention sees"),
    (r"layers are interleaved", "layers run several times, which no cut between layers allows"),
    (r"only models with one list of layers", "layers lie in several lists"),
    (r"GuardOnDataDependent|depends on values", "steps or sizes that depend on values"),
    (r"'NoneType'|tie_weights_keys", "transformers cannot build our tiny one"),
    (r"names no number of layers", "config.json names no number of layers"),
    (r"complex64", "complex numbers"),
    (r"no bp\.attention|neither positions nor a cache", "no layer attends, or not to a cache"),
    (r"of bfloat16", "a constant of the model is of bfloat16"),
    (r"(uses|with) (position_bias|sinks)", "attention with a bias of the model's own"),
    (r"computes with its mask|mask of its own", "the model makes its own mask"),
    (r"cut into chunks", "attention is cut into chunks of the sequence"),
    (r"attention written out", "attention written out with more than a kernel computes"),
]


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
    return outcome.reason.replace("|", "\\|")[:_LONGEST]
