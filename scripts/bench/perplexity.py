#!/usr/bin/env python3
"""Measures the perplexity of a model's variants on a fixed text.

Method: the text's tokens are cut into windows; in each the model is given the tokens so far and
predicts the next, through the product's own engine. A window starts with the token that begins a
sequence if the model wants one, else its first token is given. Logarithms are summed in f64.

Limits: perplexities of different tokenizers or windows cannot be compared. A model that was not
trained on such text has a high perplexity without being wrong; the ratio of a variant to f32 is
what says how much its format costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchkit.child import run_in_child
from benchkit.command import check_json_path, main, team_sizes
from benchkit.contestants import ModelChoice
from benchkit.perplexity import combine, score_window, windows
from benchkit.report import describe, machine, table, write_json
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.launcher.loading import StepSizes, open_engine
from buddy_pipeline.launcher.tokenizer import open_tokenizer
from buddy_pipeline.partition.errors import UserError

_TEXT = Path(__file__).parent / "data" / "harbour.txt"
#: Fewer tokens than this say little about a small difference.
_LEAST_TOKENS = 2000
#: Tokens of one step, and rows of logits: 64 rows of a vocabulary of 150,000 are 38 MB.
_ROWS = 64
_BASE = "f32"
_SLOT = 0


def perplexity(
    spec: Annotated[str, typer.Option(help="A shipped spec or JSON file.")],
    local_model: Annotated[
        Path | None, typer.Option(help="Weights for the spec, as for buddy-pipeline.")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Number format; may be repeated. Default: the spec's.")
    ] = None,
    against_f32: Annotated[
        bool, typer.Option("--against-f32", help="Also score f32, and print ratios to it.")
    ] = False,
    text: Annotated[Path, typer.Option(help="The text, UTF-8.")] = _TEXT,
    window: Annotated[int, typer.Option(min=2, help="Tokens of one piece.")] = 1024,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Compiled objects.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Measures the perplexity of a model's variants on a fixed text."""
    check_json_path(json)
    forms: list[str | None] = [*variant] if variant else [None]
    if against_f32:
        forms.insert(0, _BASE)
    if threads is not None:
        team_sizes(str(threads))  # refuses more than there are cores, as in the other scripts
    content = _read(text)
    choices = {}
    for form in forms:
        choice = ModelChoice(spec, local_model, form, window + 1)
        choices[choice.open().variant] = choice  # a mistake shows before any waiting
    facts = machine()
    print(describe(facts))
    results = [
        {"variant": name, **run_in_child(name, score, choice, content, window, threads, cache_dir)}
        for name, choice in choices.items()
    ]
    base = next((r["perplexity"] for r in results if r["variant"] == _BASE), None)
    rows = []
    for result in results:
        ratio = None if base is None or not against_f32 else result["perplexity"] / base
        result["ratio_to_f32"] = ratio
        shown = "-" if ratio is None else f"{ratio:.5f}"
        rows.append(
            (result["variant"], f"{result['tokens']}", f"{result['perplexity']:.4f}", shown)
        )
    print(table(("variant", "tokens", "perplexity", "ratio to f32"), rows))
    report = {"machine": facts, "method": __doc__, "spec": spec, "text": text.name}
    write_json(json, report | {"window": window, "results": results})


def score(
    choice: ModelChoice, text: str, window: int, threads: int | None, cache_dir: Path | None
) -> dict[str, Any]:
    """Tokens and perplexity of one variant; UserError for a text that is too short."""
    model = choice.open()
    tokenizer = open_tokenizer(model.checkpoint.tokenizer)
    ids = tokenizer.encode(text, add_special=False)
    if len(ids) < _LEAST_TOKENS:
        raise UserError(
            f"--text has {len(ids)} tokens with this model's tokenizer: "
            f"give one of at least {_LEAST_TOKENS}"
        )
    beginning = tokenizer.encode("")  # what the model wants before any text
    sizes = StepSizes(_ROWS, _ROWS, slots=1)
    scores = []
    with open_engine(model, threads, sizes, Cache.open(cache_dir), show=True) as (engine, _):
        for part in windows(ids, window, beginning):
            logits = engine.score(_SLOT, part[:-1])
            scores.append(score_window(part, logits))
    total = combine(scores)
    return {"tokens": total.tokens, "perplexity": total.perplexity}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--text {path} is not UTF-8: save it as that") from None


if __name__ == "__main__":
    main(perplexity)
