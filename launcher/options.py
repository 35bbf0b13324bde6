"""The options of the command line, each a type that says its panel in --help, text and value."""

from pathlib import Path
from typing import Annotated, Any

import typer

from buddy_pipeline.launcher import settings
from buddy_pipeline.launcher.numbers import byte_size, number, positive_number, whole_number
from buddy_pipeline.launcher.paths import path
from buddy_pipeline.launcher.settings import MOST_AT_ONCE

_MODEL, _PROMPT, _SAMPLING = "Model", "Prompt", "Sampling"
_PIPELINE, _OUTPUT = "Pipeline", "Output"

#: Ranks that a command without ranks may be asked about: more than any model has layers.
_MOST_RANKS = 65_536


def _option(panel: str, text: str, *names: str, **how: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **how)


def _whole(
    panel: str,
    text: str,
    *names: str,
    metavar: str = "N",
    least: int | None = None,
    most: int | None = None,
) -> Any:
    return _option(panel, text, *names, metavar=metavar, parser=whole_number(least, most))


def _flag(panel: str, text: str, *names: str) -> Any:
    # Without this the help would show a value that flags do not take.
    return _option(panel, text, *names, metavar="")


def _path(panel: str, text: str, *names: str) -> Any:
    return _option(panel, text, *names, metavar="PATH", parser=path)


def _number(panel: str, text: str, metavar: str) -> Any:
    return _option(panel, text, metavar=metavar, parser=number)


Spec = Annotated[
    str,
    _option(_MODEL, "A shipped spec, such as smollm2-135m, or a JSON file.", metavar="NAME|FILE"),
]
Variant = Annotated[
    str | None, _option(_MODEL, "Number format; overrides the spec's.", metavar="NAME")
]
Exact = Annotated[bool, _option(_MODEL, "Keep activations in f32, with --variant gguf.", "--exact")]
KvCacheDtype = Annotated[
    str | None,
    _option(_MODEL, "Type of the KV cache, such as int8; default the variant's.", metavar="NAME"),
]
LocalModel = Annotated[
    Path | None,
    _path(_MODEL, "Hugging Face directory or .gguf file to take the weights from."),
]

Prompt = Annotated[str | None, _option(_PROMPT, "The prompt.")]
PromptFile = Annotated[Path | None, _path(_PROMPT, "Text file with the prompt.")]
Messages = Annotated[
    Path | None, _path(_PROMPT, 'JSON file: a list of {"role": ..., "content": ...}.')
]
Raw = Annotated[bool, _flag(_PROMPT, "Give the prompt as it is, without chat template.", "--raw")]

MaxTokens = Annotated[int, _whole(_SAMPLING, "Most tokens to generate.")]
Temperature = Annotated[float, _number(_SAMPLING, "0 always takes the best token.", "T")]
TopK = Annotated[int, _whole(_SAMPLING, "Sample among the K best; 0 for all.", metavar="K")]
TopP = Annotated[float, _number(_SAMPLING, "Sample among the best that sum to P.", "P")]
MinP = Annotated[
    float, _number(_SAMPLING, "Drop tokens below P times the best one's probability.", "P")
]
RepeatPenalty = Annotated[float, _number(_SAMPLING, "Penalty on recent tokens; 1 for none.", "P")]
RepeatLastN = Annotated[int, _whole(_SAMPLING, "How many tokens are recent; -1 for all.")]
Seed = Annotated[int | None, _whole(_SAMPLING, "Makes sampling repeatable.")]
Stop = Annotated[
    list[str] | None,
    _option(_SAMPLING, "Text to stop before; may be given again.", metavar="TEXT"),
]
IgnoreEos = Annotated[
    bool,
    _flag(
        _SAMPLING,
        "Go on after the end of the answer; control tokens are then printed.",
        "--ignore-eos",
    ),
]

Threads = Annotated[
    int | None,
    _whole(_PIPELINE, "Threads a rank; default the host's cores over its ranks.", least=1),
]
Split = Annotated[
    str | None,
    _option(
        _PIPELINE,
        "Layers of each rank, rank 0 (the last layers) first; default as even as possible.",
        metavar="N,N,...",
    ),
]
Balance = Annotated[
    settings.Balance,
    _option(
        _PIPELINE,
        "Deal layers out evenly, by memory, or by timing each block on its rank.",
    ),
]
PlanBalance = Annotated[
    settings.PlanBalance,
    _option(_PIPELINE, "Deal layers out evenly, by memory, or by the predicted time of a step."),
]
Hosts = Annotated[
    Path | None,
    _path(
        _PIPELINE,
        "JSON file with memory_gb, bandwidth_gb_s and gflops of each host, and the link between"
        " them; default hosts like this one.",
    ),
]
Sequences = Annotated[int, _whole(_PIPELINE, "Sequences at once.", least=1)]
CacheDir = Annotated[
    Path | None, _path(_PIPELINE, "Folder of compiled objects; default in the user's cache.")
]
MaxSequences = Annotated[
    int, _whole(_PIPELINE, "Sequences that run at once; others wait.", least=1, most=MOST_AT_ONCE)
]
Microbatches = Annotated[
    int | None,
    _whole(
        _PIPELINE,
        "Parts that the running sequences are dealt out to; default by the ranks' measured times.",
        least=1,
        most=MOST_AT_ONCE,
    ),
]
PrefillChunk = Annotated[
    int | None,
    _whole(
        _PIPELINE,
        "Most prompt tokens in a step; default by the ranks and by what else runs.",
        least=1,
        most=MOST_AT_ONCE,
    ),
]
KvMemory = Annotated[
    int | None,
    _option(
        _PIPELINE,
        "Memory for the KV cache on each rank, such as 2G; default most of what is free.",
        metavar="BYTES",
        parser=byte_size,
    ),
]
StepTimeout = Annotated[
    float | None,
    _option(
        _PIPELINE,
        "End the job, naming the rank, when a step takes longer; default never.",
        metavar="SECONDS",
        parser=positive_number,
    ),
]
World = Annotated[int, _whole(_PIPELINE, "How many ranks there are.", least=1, most=_MOST_RANKS)]
Jobs = Annotated[
    int | None,
    _whole(_PIPELINE, "Compilers at a time; default one a core.", "-j", "--jobs", least=1),
]
TargetCpu = Annotated[
    str | None,
    _option(
        _PIPELINE,
        "CPU to compile for: our name or, in a build directory, LLVM's; default this machine's.",
        metavar="CPU",
    ),
]

QuantizedOutput = Annotated[
    Path, _path(_OUTPUT, "Folder for the quantised model.", "--output", "-o")
]
JsonFile = Annotated[
    Path | None, _path(_OUTPUT, "Write ids, text and statistics to this file.", "--json")
]
TopLogits = Annotated[
    int, _whole(_OUTPUT, "Put the K best logits after the prompt in it.", metavar="K", least=0)
]
ProfileOut = Annotated[
    Path | None,
    _path(
        _OUTPUT,
        "Profile the run: tables on standard error, a trace and a timeline in this folder.",
    ),
]
Stats = Annotated[bool, _flag(_OUTPUT, "Statistics on standard error.", "--stats/--no-stats")]
BatchInput = Annotated[
    Path,
    _path(
        _PROMPT,
        "JSON lines: an object each with id, prompt or messages, raw, and sampling options.",
        "--input",
    ),
]
BatchOutput = Annotated[
    Path,
    _path(
        _OUTPUT,
        "JSON lines with the results; those of an interrupted run are kept and not done again.",
        "--output",
    ),
]
Report = Annotated[
    Path | None, _path(_OUTPUT, "File for the JSON report; default standard output.")
]
