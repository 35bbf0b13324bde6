"""The command line: what a user sees, from --help to the last line of a run."""

import inspect
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from buddy_pipeline.launcher import api, cli
from buddy_pipeline.launcher.settings import Balance
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.sampling import SamplingOptions
from tests.launcher.fakes import FakeEngine, FakeSession, scripted

PLAN = ["--spec", "s", "--world", "2"]
RUN = ["--spec", "smollm2-135m", "--prompt", "Hi"]


class Module(ModuleType):
    """A module made of one function."""

    def __init__(self, name: str, **functions: Any) -> None:
        super().__init__(f"buddy_pipeline.launcher.{name}")
        self.__dict__.update(functions)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    """The session that commands open instead of a pipeline."""
    fake = FakeSession(scripted("Hello"))
    monkeypatch.setattr(api, "open_session", fake.open)
    return fake


def place(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = Module(name, **functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a wrong command line prints."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("buddy-pipeline: error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("buddy-pipeline: error: ").rstrip("\n")


@pytest.mark.parametrize("command", [[], ["run"]])
def test_run_is_the_default_command(
    command: list[str], session: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, *RUN]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello\n"
    assert printed.err.startswith("prompt 8 tokens, ")
    assert printed.err.endswith("peak memory by rank 300, 100 MB\n")


def test_no_stats_leaves_only_the_text(
    session: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*RUN, "--no-stats"]) == 0
    assert capsys.readouterr() == ("Hello\n", "")


def test_every_option_arrives_in_the_settings(session: FakeSession, tmp_path: Path) -> None:
    code = cli.main(
        "run --spec s --variant f32 --local-model m --prompt p --raw --max-tokens 3"
        " --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1"
        " --repeat-last-n -1 --seed 7 --stop a --stop b --ignore-eos --threads 2 --split 1,2"
        f" --cache-dir c --json {tmp_path / 'o.json'} --top-logits 5 --no-stats"
        " --profile-out p".split()
    )
    settings = session.settings
    assert code == 0
    assert (settings.spec, settings.variant, settings.local_model) == ("s", "f32", Path("m"))
    assert (settings.prompt.text, settings.prompt.raw) == ("p", True)
    assert settings.sampling == SamplingOptions(
        3, 0.5, 4, 0.9, 0.1, 1.1, -1, 7, ("a", "b"), ignore_eos=True
    )
    assert (settings.threads, settings.split, settings.cache_dir) == (2, (1, 2), Path("c"))
    assert (settings.top_logits, settings.stats) == (5, False)
    assert settings.json_path == tmp_path / "o.json"
    assert (settings.balance, settings.profile_out) == (Balance.EVEN, Path("p"))
    cli.main([*RUN, "--balance", "memory"])
    assert session.settings.balance is Balance.MEMORY


def test_options_left_out_are_the_defaults_of_sampling(session: FakeSession) -> None:
    cli.main(RUN)
    assert session.settings.sampling == SamplingOptions()
    parameters = inspect.signature(cli.run).parameters
    assert {field.name for field in fields(SamplingOptions)} < set(parameters)


def test_json_and_top_logits_describe_the_run(session: FakeSession, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert cli.main([*RUN, "--json", str(path), "--top-logits", "2"]) == 0
    content = json.loads(path.read_text(encoding="utf-8"))
    assert bytes(content["prompt_ids"]) == b"[user]Hi"
    assert content["token_ids"] == [*b"Hello", 256]
    assert content["text"] == "Hello"
    assert content["finish_reason"] == "eos"
    assert content["top_logits"] == [[ord("H"), 9.0], [256, 1.0]]
    assert content["stats"]["prompt_tokens"] == 8
    assert content["stats"]["generation_tokens"] == 6
    assert content["stats"]["peak_memory_bytes"] == [300_000_000, 100_000_000]
    assert content["stats"]["time_to_first_token_s"] > 0


def test_a_rank_without_an_engine_serves_and_prints_nothing(
    session: FakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    session.engine = None
    with pytest.raises(SystemExit) as leaving:
        cli.main(RUN)
    assert leaving.value.code == 0
    assert session.served
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "Hi"], "run needs --spec, --build-dir or --bundle: give one of them"),
        (["--spec", "s"], "there is no prompt: give --prompt, --prompt-file or --messages"),
        ([*RUN, "--messages", "m"], "--prompt and --messages exclude each other"),
        ([*RUN, "--tempratur", "1"], "No such option: --tempratur"),
        ([*RUN, "--temperature", "warm"], "'--temperature': 'warm' is not a number"),
        ([*RUN, "--temperature", "-1"], "--temperature is -1.0: it must be a finite number"),
        ([*RUN, "--temperature", "nan"], "--temperature is nan"),
        ([*RUN, "--top-p", "1.5"], "--top-p is 1.5: it must be above 0 and at most 1"),
        ([*RUN, "--max-tokens", "0"], "--max-tokens is 0: it must be at least 1"),
        ([*RUN, "--max-tokens", "1.5"], "'--max-tokens': '1.5' is not a whole number"),
        ([*RUN, "--stop", ""], "--stop is empty"),
        ([*RUN, "--threads", "0"], "'--threads': '0' is not a whole number of 1 or more"),
        ([*RUN, "--split", "8,x"], "'x' is not a number of layers"),
        ([*RUN, "--top-logits", "3"], "--top-logits 3 has nowhere to go: add --json FILE"),
        ([*RUN, "--top-logits", "-3", "--json", "x"], "'--top-logits': '-3' is not a whole"),
        (["comiple", "--spec", "s"], "No such command 'comiple'"),
        (["compile", "--spec", "s", "--rank", "-1"], "'--rank': '-1' is not a whole number"),
        (["verify", "--spec", "s", "--world", "100000000"], "of 1 or more and at most 65,536"),
        ([*RUN, "--local-model", ""], "'--local-model': it is empty: give a path"),
        ([*RUN, "--cache-dir", " "], "'--cache-dir': it is empty: give a path"),
        (["plan", "--spec", "s"], "Missing option '--world'."),
        ([*RUN, "--balance", "fair"], "'fair' is not one of 'even', 'memory', 'measured'"),
        ([*RUN, "--balance", "memory", "--split", "1,2"], "both deal the layers out: give one"),
        (["plan", *PLAN, "--balance", "measured"], "is not one of 'even', 'memory', 'speed'"),
        (["plan", *PLAN, "--balance", "speed", "--split", "1,2"], "--split 1,2 and --balance sp"),
        (["plan", *PLAN, "--sequences", "0"], "'--sequences': '0' is not a whole number of 1"),
        ([*RUN, "--profile-out", ""], "'--profile-out': it is empty: give a path"),
        ([*RUN, "more"], "unexpected extra argument"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_option_and_value(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(arguments, capsys)


def test_under_mpi_only_rank_0_prints_what_all_ranks_find(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    assert cli.main(["--spec", "s"]) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("PMI_RANK", "0")
    assert refusal(["--spec", "s"], capsys).startswith("there is no prompt")


def test_user_errors_of_a_command_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: Any) -> int:
        raise UserError("spec 'x' is\nwrong")

    place(monkeypatch, "verifying", verify_command=fail)
    assert refusal(["verify", "--spec", "x", "--world", "2"], capsys) == "spec 'x' is wrong"


def test_other_faults_of_a_command_are_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: Any) -> int:
        raise RuntimeError("the compiler\ndied")

    place(monkeypatch, "building", compile_command=fail)
    assert cli.main(["compile", "--spec", "x"]) == 1
    assert capsys.readouterr() == ("", "buddy-pipeline: error: RuntimeError: the compiler died\n")


@pytest.mark.parametrize("code", [0, 1])
def test_the_exit_code_is_the_command_s(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    seen: list[Any] = []

    def compile_command(settings: Any) -> int:
        seen.append(settings)
        return code

    place(monkeypatch, "building", compile_command=compile_command)
    arguments = "compile --spec s --rank 1 --world 4 -j 2 --target-cpu znver5 --split 1,2,3,4"
    assert cli.main(arguments.split()) == code
    (settings,) = seen
    assert (settings.rank, settings.world, settings.jobs) == (1, 4, 2)
    assert (settings.target_cpu, settings.split) == ("znver5", (1, 2, 3, 4))


def test_number_formats_can_be_chosen_wherever_a_model_runs_or_is_planned() -> None:
    """`quantize` writes weights, of which neither option says anything."""
    for command in cli.app.registered_commands:
        assert command.callback is not None
        names = set(inspect.signature(command.callback).parameters)
        if "variant" in names and command.name != "quantize":
            assert {"exact", "kv_cache_dtype"} <= names, command.name


def test_number_formats_of_a_batch_arrive_in_the_settings(
    session: FakeSession, tmp_path: Path
) -> None:
    lines, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text('{"id": 1, "prompt": "Hi"}\n')
    formats = "--variant gguf --exact --kv-cache-dtype int8"
    arguments = f"batch --spec s {formats} --input {lines} --output {results}"
    assert cli.main(arguments.split()) == 0
    settings = session.settings
    assert (settings.variant, settings.exact, settings.kv_cache_dtype) == ("gguf", True, "int8")


def test_help_groups_the_options_of_run_and_lists_the_commands() -> None:
    printed = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "120"})
    assert printed.exit_code == 0
    for word in ("compile", "verify", "Model", "Prompt", "Sampling", "Pipeline", "Output"):
        assert word in printed.stdout
    for parameter in ("--spec", "--prompt-file", "--temperature", "--split", "--top-logits"):
        assert parameter in printed.stdout


def test_help_loads_neither_numbers_nor_compilers_nor_mpi() -> None:
    code = (
        "import sys; from buddy_pipeline.launcher.cli import main; main(['--help']);"
        "print([m for m in ('numpy', 'torch', 'mlir', 'mpi4py', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("changes", "context", "message"),
    [
        ([], 7, "8 tokens, but the context holds 7"),
        (["--json", "none/out.json"], 100, "--json none/out.json cannot be written"),
    ],
)
def test_a_request_is_checked_before_anything_is_loaded(
    changes: list[str],
    context: int,
    message: str,
    session: FakeSession,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert session.engine is not None
    session.engine.context_length = context
    assert message in refusal([*RUN, *changes], capsys)
    assert not session.opened


def test_text_comes_out_as_it_is_made(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = session.engine
    assert isinstance(engine, FakeEngine)
    seen: list[str] = []
    advance = engine.advance

    def spying_advance() -> Any:
        seen.append(capsys.readouterr().out)
        return advance()

    monkeypatch.setattr(engine, "advance", spying_advance)
    assert cli.main([*RUN, "--max-tokens", "4"]) == 0
    assert seen == ["", "H", "e", "l", "l"]
