"""The options of the build commands; see `options` for those that all commands share."""

from pathlib import Path
from typing import Annotated

from buddy_pipeline.launcher.options import (
    _MODEL,
    _MOST_RANKS,
    _OUTPUT,
    _PIPELINE,
    _PROMPT,
    _option,
    _path,
    _whole,
)

_BUILD = "Build"

Config = Annotated[Path, _path(_BUILD, "Configuration that gen-config wrote.", "--config")]
OptionalConfig = Annotated[
    Path | None,
    _path(_BUILD, "Configuration of a build directory, in place of --spec.", "--config"),
]
OptionalSpec = Annotated[
    str | None,
    _option(_MODEL, "A shipped spec, such as smollm2-135m, or a JSON file.", metavar="NAME|FILE"),
]
Output = Annotated[Path, _path(_OUTPUT, "File to write.", "-o", "--output")]
BuildDir = Annotated[
    Path | None, _path(_BUILD, "Folder for what is built; default that of the configuration.")
]
NewBuildDir = Annotated[
    Path | None, _path(_BUILD, "Folder for what is built; default build/SPEC.", "--build-dir")
]
Strategy = Annotated[
    str, _option(_BUILD, "How a layer is cut: coarse, block or fine.", metavar="NAME")
]
OptionalStrategy = Annotated[
    str | None,
    _option(_BUILD, "How a layer is cut: coarse, block or fine; default coarse.", metavar="NAME"),
]
WholeGraph = Annotated[
    bool,
    _option(
        _BUILD,
        "One module for the whole graph, without templates.",
        "--no-layer-partition",
        "--whole-graph",
    ),
]
Sharing = Annotated[
    bool | None,
    _option(
        _BUILD,
        "The whole graph as one module, or partitions; default as configured.",
        "--whole-graph/--partitioned",
    ),
]
OptionalRank = Annotated[
    int | None, _whole(_PIPELINE, "The only rank to do this for; default all.", least=0)
]
OptionalWorld = Annotated[
    int | None,
    _whole(
        _PIPELINE,
        "How many ranks there are; default those that mpirun started.",
        least=1,
        most=_MOST_RANKS,
    ),
]
CompiledRank = Annotated[
    int | None,
    _whole(_PIPELINE, "The rank to compile for; default that of this process, or 0.", least=0),
]
SkipFullMlir = Annotated[
    bool, _option(_BUILD, "Leave out the combined forward_PHASE.mlir.", "--skip-full-mlir")
]
SkipWeights = Annotated[
    bool, _option(_BUILD, "No weights: a model's config.json is enough.", "--skip-weights")
]
DebugWrappers = Annotated[
    bool,
    _option(_BUILD, "Scripts that run one partition alone on saved inputs.", "--debug-wrappers"),
]
ReuseWeights = Annotated[
    bool,
    _option(_BUILD, "Keep packed weights that fit.", "--reuse-weights/--no-reuse-weights"),
]
DirectWeights = Annotated[
    bool,
    _option(
        _BUILD,
        "Stream weights to their files, or join them in memory first.",
        "--direct-weight-export/--no-direct-weight-export",
    ),
]
TimeReport = Annotated[
    Path | None, _path(_OUTPUT, "JSON file for the seconds of each stage and object.")
]
TargetTriple = Annotated[
    str | None, _option(_PIPELINE, "LLVM's target triple; default this machine's.", metavar="T")
]
TargetFeatures = Annotated[
    str | None, _option(_PIPELINE, "LLVM's features, such as +v,+avx512bf16.", metavar="F,F,...")
]
AsJson = Annotated[bool, _option(_OUTPUT, "JSON in place of a table.", "--json")]
VerifyAll = Annotated[
    bool, _option(_BUILD, "Read all of a bundle and compare it with its hashes.", "--verify")
]
BuiltDir = Annotated[
    Path | None, _path(_MODEL, "A compiled build directory to run, in place of --spec.")
]
VerifiedDir = Annotated[
    Path | None, _path(_MODEL, "A build directory to verify, in place of --spec.", "--build-dir")
]
BundlePath = Annotated[
    Path | None, _path(_MODEL, "A bundle, or a folder with one a rank, in place of --spec.")
]
ValuesInputs = Annotated[
    list[Path] | None,
    _path(_PROMPT, "Saved values, .npz by name; may be given again.", "--inputs"),
]
ValuesOutput = Annotated[Path, _path(_OUTPUT, "The .npz to write.", "-o", "--output")]
RandomValues = Annotated[
    int | None, _whole(_PROMPT, "Random values where no file has them.", metavar="SEED", least=0)
]
Tokens = Annotated[int | None, _whole(_PROMPT, "Tokens, where no file says how many.", least=1)]
Step = Annotated[
    int | None, _whole(_PIPELINE, "Tokens at a time; 1 is decode, default all.", least=1)
]
PackedWeights = Annotated[
    bool, _option(_BUILD, "Put the packed weights inside.", "--weights/--no-weights")
]
OutputFolder = Annotated[Path, _path(_OUTPUT, "Folder for the bundles.", "-o", "--output")]
Numeric = Annotated[
    bool,
    _option(_BUILD, "Compare logits with the whole graph's and with transformers'.", "--numeric"),
]
NumericPrompts = Annotated[
    list[str] | None,
    _option(_BUILD, "Prompt of the numeric check; may be given again.", "--prompt", metavar="TEXT"),
]
