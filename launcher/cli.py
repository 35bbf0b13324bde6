"""The command line: options to settings, settings to the commands.

Only what parsing needs is imported here; a command imports the rest when it starts, so that
`--help` and a wrong option answer at once.
"""

import sys
from collections.abc import Sequence

import typer

from buddy_pipeline.launcher import build_options, options
from buddy_pipeline.launcher.build_commands import add_build_commands
from buddy_pipeline.launcher.built_commands import add_built_commands
from buddy_pipeline.launcher.console import print_common_error
from buddy_pipeline.launcher.decided import check_undecided
from buddy_pipeline.launcher.default_command import DefaultCommandGroup
from buddy_pipeline.launcher.settings import (
    MAX_SEQUENCES,
    Balance,
    BatchSettings,
    PlanBalance,
    PlanSettings,
    QuantizeSettings,
    RunSettings,
)
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.error_lines import USER_ERROR, describe

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

app = typer.Typer(
    cls=DefaultCommandGroup,
    help="Runs a language model over MPI ranks on CPUs; each rank compiles and loads its layers.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("run", help="Answers a prompt. This is the default command.")
def run(
    *,
    spec: build_options.OptionalSpec = None,
    build_dir: build_options.BuiltDir = None,
    bundle: build_options.BundlePath = None,
    variant: options.Variant = None,
    exact: options.Exact = False,
    kv_cache_dtype: options.KvCacheDtype = None,
    local_model: options.LocalModel = None,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    messages: options.Messages = None,
    raw: options.Raw = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repeat_penalty: options.RepeatPenalty = 1.0,
    repeat_last_n: options.RepeatLastN = 64,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    threads: options.Threads = None,
    split: options.Split = None,
    balance: options.Balance = Balance.EVEN,
    cache_dir: options.CacheDir = None,
    prefill_chunk: options.PrefillChunk = None,
    kv_memory: options.KvMemory = None,
    step_timeout: options.StepTimeout = None,
    json_file: options.JsonFile = None,
    top_logits: options.TopLogits = 0,
    profile_out: options.ProfileOut = None,
    stats: options.Stats = True,
) -> int:
    """Generates text on rank 0; the other ranks compute their layers."""
    from buddy_pipeline.launcher.prompt import PromptSource
    from buddy_pipeline.ranks.sampling import SamplingOptions

    try:
        sampling = SamplingOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            repeat_last_n=repeat_last_n,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
        )
    except UserError as error:  # its message starts with the field's name
        name, rest = str(error).split(" ", 1)
        raise UserError(f"--{name.replace('_', '-')} {rest}") from None
    if top_logits and json_file is None:
        raise UserError(f"--top-logits {top_logits} has nowhere to go: add --json FILE")
    _check_balance(split, balance)
    if sum(source is not None for source in (spec, build_dir, bundle)) != 1:
        raise UserError("run needs --spec, --build-dir or --bundle: give one of them")
    decided = {"--variant": variant, "--exact": exact, "--kv-cache-dtype": kv_cache_dtype}
    if build_dir is not None:
        check_undecided(decided, "--build-dir", build_dir)
    if bundle is not None:
        other = balance.value if balance is not Balance.EVEN else None
        check_undecided({**decided, "--split": split, "--balance": other}, "--bundle", bundle)
    settings = RunSettings(
        spec=spec or "",
        build_dir=build_dir,
        bundle=bundle,
        variant=variant,
        exact=exact,
        kv_cache_dtype=kv_cache_dtype,
        local_model=local_model,
        threads=threads,
        split=_split(split),
        balance=balance,
        cache_dir=cache_dir,
        prefill_chunk=prefill_chunk,
        kv_memory_bytes=kv_memory,
        step_timeout_s=step_timeout,
        prompt=PromptSource(prompt, prompt_file, messages, raw),
        sampling=sampling,
        top_logits=top_logits,
        json_path=json_file,
        profile_out=profile_out,
        stats=stats,
    )
    from buddy_pipeline.launcher.running import run_command

    return run_command(settings)


@app.command("batch", help="Answers many prompts at once, from a file of JSON lines to another.")
def batch(
    *,
    spec: options.Spec,
    variant: options.Variant = None,
    exact: options.Exact = False,
    kv_cache_dtype: options.KvCacheDtype = None,
    local_model: options.LocalModel = None,
    input: options.BatchInput,
    threads: options.Threads = None,
    split: options.Split = None,
    balance: options.Balance = Balance.EVEN,
    cache_dir: options.CacheDir = None,
    max_sequences: options.MaxSequences = MAX_SEQUENCES,
    microbatches: options.Microbatches = None,
    prefill_chunk: options.PrefillChunk = None,
    kv_memory: options.KvMemory = None,
    step_timeout: options.StepTimeout = None,
    output: options.BatchOutput,
    profile_out: options.ProfileOut = None,
    stats: options.Stats = True,
) -> int:
    """Keeps all ranks busy with as many sequences as are to run at once."""
    _check_balance(split, balance)
    settings = BatchSettings(
        spec=spec,
        variant=variant,
        exact=exact,
        kv_cache_dtype=kv_cache_dtype,
        local_model=local_model,
        threads=threads,
        split=_split(split),
        balance=balance,
        cache_dir=cache_dir,
        max_sequences=max_sequences,
        microbatches=microbatches,
        prefill_chunk=prefill_chunk,
        kv_memory_bytes=kv_memory,
        step_timeout_s=step_timeout,
        profile_out=profile_out,
        input=input,
        output=output,
        stats=stats,
    )
    from buddy_pipeline.launcher.batch import batch_command

    return batch_command(settings)


@app.command("quantize", help="Writes a model in few bits, so that no start quantises it again.")
def quantize(
    *,
    spec: options.Spec,
    variant: options.Variant = None,
    local_model: options.LocalModel = None,
    output: options.QuantizedOutput,
    cache_dir: options.CacheDir = None,
) -> int:
    """Converts a checkpoint; an interrupted conversion goes on where it stopped."""
    settings = QuantizeSettings(
        spec=spec, variant=variant, local_model=local_model, output=output, cache_dir=cache_dir
    )
    from buddy_pipeline.launcher.quantizing import quantize_command

    return quantize_command(settings)


@app.command("plan", help="Predicts memory and speed of a split for these hosts, at once.")
def plan(
    *,
    spec: options.Spec,
    world: options.World,
    hosts: options.Hosts = None,
    variant: options.Variant = None,
    exact: options.Exact = False,
    kv_cache_dtype: options.KvCacheDtype = None,
    local_model: options.LocalModel = None,
    split: options.Split = None,
    balance: options.PlanBalance = PlanBalance.EVEN,
    sequences: options.Sequences = 16,
) -> int:
    """Prints the split, each rank's memory, and tokens/s for one and for many sequences."""
    _check_balance(split, balance)
    settings = PlanSettings(
        spec=spec,
        variant=variant,
        exact=exact,
        kv_cache_dtype=kv_cache_dtype,
        local_model=local_model,
        world=world,
        hosts=hosts,
        split=_split(split),
        balance=balance,
        sequences=sequences,
    )
    from buddy_pipeline.launcher.planning import plan_command

    return plan_command(settings)


add_build_commands(app)
add_built_commands(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments`, by default this process's, and returns the exit code.

    0 for success, 2 for what the user can mend and 1 for other faults, with one line on standard
    error.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Without standalone mode the command's result and its errors arrive here.
        command = typer.main.get_command(app)
        result = command.main(given or ["--help"], "buddy-pipeline", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except _WRONG_USAGE as error:
        message, code = error.format_message(), USER_ERROR  # type: ignore[attr-defined]
    except typer.Abort:
        return _INTERRUPTED
    except Exception as error:
        message, code = describe(error)
    if message:
        print_common_error(message)
    return code


# typer does not export the base of its errors about options (click's UsageError, which newer
# versions of typer carry inside), only one that derives from it.
_WRONG_USAGE: type[Exception] = typer.BadParameter.__bases__[0]


def _check_balance(split: str | None, balance: Balance | PlanBalance) -> None:
    if split is not None and balance.value != "even":
        raise UserError(
            f"--split {split} and --balance {balance.value} both deal the layers out: give one"
        )


def _split(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    from buddy_pipeline.partition.layers import parse_split

    return parse_split(text)
