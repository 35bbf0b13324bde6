"""What goes wrong for real users: the message, the exit code, and that nothing is left running."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from buddy_pipeline.ranks.roll_call import GRACE_S, PREPARING_S
from tests.e2e.command import COMMAND, answer, buddy_pipeline, refusal, start
from tests.jobs import TIMEOUT_S, end, eventually
from tests.mpi.job import needs_mpi

WORLD = 3
FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage, with a spec beside it."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    (path / "spec.json").write_text(json.dumps({"hf_model_path": str(path)}))
    return path


def ask(model: Path, *more: object) -> list[object]:
    return ["--spec", model / "spec.json", "--raw", "--prompt", "Hello", "--max-tokens", 4, *more]


def change_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def lengthen(model: Path) -> None:
    """Make room for a text that does not end before a test ends it."""
    change_config(model, max_position_embeddings=500_000)


def ranks_of(job: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes that work as a job's ranks, by rank."""
    return {rank: found[-1] for rank, found in processes_of(job).items() if len(found) == 2}


def processes_of(job: subprocess.Popen[str]) -> dict[int, list[psutil.Process]]:
    """By rank: the process that looks after it, and the one that works."""
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            environment = process.environ()
            if "PMI_RANK" in environment and COMMAND.name in " ".join(process.cmdline()):
                found.setdefault(int(environment["PMI_RANK"]), []).append(process)
    pids = {process.pid for of_rank in found.values() for process in of_rank}
    for of_rank in found.values():
        of_rank.sort(key=lambda process: process.ppid() in pids)
    return found


def errors(job: subprocess.Popen[str]) -> list[str]:
    """Our lines on standard error; MPICH's mpirun adds its own when ranks were killed."""
    assert job.stderr is not None
    text = job.stderr.read()
    assert "Traceback" not in text
    return re.findall(r"^buddy-pipeline: error: (.*)$", text, re.MULTILINE)


def has_loaded_mpi(process: psutil.Process) -> bool:
    """Whether a rank is about to call MPI_Init, or past that."""
    try:
        return any("mpi4py" in library.path for library in process.memory_maps())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("victim", range(WORLD))
def test_a_killed_rank_ends_the_job(victim: int, model: Path, cache: Path) -> None:
    lengthen(model)
    job = start(*ask(model, "--max-tokens", 499_000, "--ignore-eos"), ranks=WORLD, cache=cache)
    try:
        assert job.stdout is not None
        assert job.stdout.read(200), "no text came"
        processes = ranks_of(job)
        assert sorted(processes) == list(range(WORLD))
        processes[victim].kill()
        job.wait(TIMEOUT_S)  # raises if the job hangs
        assert job.returncode != 0
        (line,) = errors(job)
        place = rf"rank {victim} of {WORLD} on \S+: process {processes[victim].pid}"
        assert re.fullmatch(rf"{place} was killed by SIGKILL .*", line)
        assert eventually(lambda: not any(process.is_running() for process in processes.values()))
    finally:
        end(job)


@needs_mpi
@pytest.mark.mpi
def test_a_rank_whose_supervisor_is_killed_ends_the_job_too(model: Path, cache: Path) -> None:
    lengthen(model)
    job = start(*ask(model, "--max-tokens", 499_000, "--ignore-eos"), ranks=WORLD, cache=cache)
    try:
        assert job.stdout is not None
        assert job.stdout.read(200), "no text came"
        processes = processes_of(job)
        processes[1][0].kill()
        job.wait(TIMEOUT_S)
        assert job.returncode != 0
        assert errors(job) == []
        everyone = [process for of_rank in processes.values() for process in of_rank]
        assert eventually(lambda: not any(process.is_running() for process in everyone))
    finally:
        end(job)


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("victim", "witness", "silence"), [(0, 1, "been heard"), (1, 0, "answered")]
)
def test_a_rank_that_is_stopped_is_named_by_another(
    victim: int, witness: int, silence: str, model: Path, cache: Path
) -> None:
    lengthen(model)
    job = start(
        *ask(model, "--max-tokens", 499_000, "--ignore-eos", "--step-timeout", 2),
        ranks=WORLD,
        cache=cache,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.read(200), "no text came"
        ranks_of(job)[victim].suspend()
        job.wait(TIMEOUT_S)
        assert job.returncode != 0
        (line,) = errors(job)
        place = rf"rank {witness} of {WORLD} on \S+: SilentRank: rank {victim} of {WORLD}"
        assert re.fullmatch(rf"{place} has not {silence} for 4 s \(--step-timeout\): .*", line)
    finally:
        end(job)


@needs_mpi
@pytest.mark.mpi
@pytest.mark.slow
def test_a_rank_that_is_stopped_while_the_model_is_planned_is_named(
    model: Path, tmp_path: Path
) -> None:
    cold = tmp_path / "cold"
    job = start(*ask(model, "--step-timeout", 2), ranks=WORLD, cache=cold)
    try:
        assert eventually(lambda: plans(job), 60.0)
        ranks_of(job)[1].suspend()
        job.wait(PREPARING_S + GRACE_S + TIMEOUT_S)
        assert job.returncode != 0
        (line,) = errors(job)
        silence = "SilentRank: rank 1 of 3 has not answered for 12 s"
        assert re.match(rf"rank 0 of {WORLD} on \S+: {silence}", line)
    finally:
        end(job)


def plans(job: subprocess.Popen[str]) -> bool:
    """Whether the process that plans a model has been started, for which all ranks have met."""
    with suppress(psutil.NoSuchProcess):
        processes = psutil.Process(job.pid).children(recursive=True)
        return any("compile.worker" in " ".join(each.cmdline()) for each in processes)
    return False


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("victim", range(WORLD))
@pytest.mark.parametrize("whom", ["worker", "supervisor"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_one_rank_ends_the_job_in_silence(
    number: signal.Signals, whom: str, victim: int, model: Path, cache: Path
) -> None:
    lengthen(model)
    answer(model / "out.json", *ask(model), cache=cache)  # what it compiles is announced
    job = start(*ask(model, "--max-tokens", 499_000, "--ignore-eos"), ranks=WORLD, cache=cache)
    try:
        assert job.stdout is not None and job.stderr is not None
        assert job.stdout.read(200), "no text came"
        processes_of(job)[victim][whom == "worker"].send_signal(number)
        job.wait(TIMEOUT_S)
        assert job.returncode != 0
        assert job.stderr.read() == ""
    finally:
        end(job)


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("when", ["starting", "generating"])
def test_an_interrupted_job_ends_in_silence(when: str, model: Path, cache: Path) -> None:
    lengthen(model)
    job = start(*ask(model, "--max-tokens", 499_000, "--ignore-eos"), ranks=2, cache=cache)
    try:
        assert job.stdout is not None and job.stderr is not None
        if when == "starting":  # ranks may wait for each other in MPI_Init
            assert eventually(lambda: sum(map(has_loaded_mpi, ranks_of(job).values())) == 2)
        else:
            assert job.stdout.read(200), "no text came"
        job.send_signal(signal.SIGINT)
        job.wait(TIMEOUT_S)
        assert job.returncode != 0
        assert "buddy-pipeline" not in job.stderr.read()
    finally:
        end(job)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.mpi, needs_mpi])])
def test_a_reader_that_leaves_ends_the_run_in_silence(ranks: int, model: Path, cache: Path) -> None:
    answer(model / "out.json", *ask(model), cache=cache)
    job = start(*ask(model, "--max-tokens", 120, "--ignore-eos"), ranks=ranks, cache=cache)
    try:
        assert job.stdout is not None and job.stderr is not None
        job.stdout.close()
        assert job.wait(TIMEOUT_S) == 128 + signal.SIGPIPE or ranks > 1
        assert job.returncode != 0
        assert job.stderr.read() == ""
        job.stdout = None
    finally:
        end(job)


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    spoilt = {
        "truncated": data[:middle],
        "altered": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "empty": b"",
        "foreign": b"#!/bin/sh\n" * 20,
    }
    path.write_bytes(spoilt[how])


@pytest.mark.parametrize(
    ("folder", "how"),
    [
        *(("objects", how) for how in ("truncated", "altered", "empty", "foreign")),
        ("plans", "altered"),
    ],
)
def test_a_damaged_cache_is_rebuilt(
    folder: str, how: str, model: Path, cache: Path, tmp_path: Path
) -> None:
    good = answer(tmp_path / "out.json", *ask(model), cache=cache)
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    for path in (own / folder).iterdir():
        spoil(path, how)
    again = answer(tmp_path / "out.json", *ask(model), cache=own)
    assert again["token_ids"] == good["token_ids"]
    assert again["text"] == good["text"]


def test_a_cache_without_its_objects_and_their_sources_is_filled_again(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    good = answer(tmp_path / "out.json", *ask(model), cache=cache)
    own = tmp_path / "cache"
    shutil.copytree(cache, own)
    shutil.rmtree(own / "objects")
    shutil.rmtree(own / "sources")
    again = answer(tmp_path / "out.json", *ask(model), cache=own)
    assert again["token_ids"] == good["token_ids"]


def test_a_truncated_weight_file_is_named(model: Path, cache: Path) -> None:
    weights = model / "model.safetensors"
    spoil(weights, "truncated")
    line = refusal(buddy_pipeline(*ask(model), cache=cache))
    assert str(weights) in line and "truncated" in line


@needs_mpi
@pytest.mark.mpi
def test_what_every_rank_finds_is_said_once(model: Path, cache: Path) -> None:
    spoil(model / "model.safetensors", "truncated")
    assert "truncated" in refusal(buddy_pipeline(*ask(model), ranks=WORLD, cache=cache))


@needs_mpi
@pytest.mark.mpi
def test_a_model_that_cannot_be_planned_is_tried_by_one_rank(model: Path, tmp_path: Path) -> None:
    change_config(model, hidden_act="sulu")
    ended = buddy_pipeline(*ask(model), ranks=WORLD, cache=tmp_path / "cache")
    assert "type 'llama' that transformers can build: KeyError: 'sulu'" in refusal(ended)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "1000000000 layers, but the weights are only 29 tensors"),
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3."),
        ({"hidden_size": 96}, "model.embed_tokens.weight has shape [261, 84]"),
        ({"vocab_size": -3}, "does not describe a model of type 'llama'"),
        ({"num_attention_heads": 0}, "does not describe a model of type 'llama'"),
        ({"hidden_size": 10**12}, "does not describe a model of type 'llama'"),
        ({"model_type": "lama"}, "model type 'lama' is not known to the installed transformers"),
        ({"model_type": "t5"}, "model type 't5' has no causal language model"),
        ({"model_type": None}, "model_type must be a string"),
        ({"rope_parameters": {"rope_type": "x"}}, "does not describe a model of type 'llama'"),
    ],
)
@pytest.mark.slow  # most of them need the compilers' own imports
def test_a_config_that_fits_no_model_or_not_the_weights_is_one_line(
    changes: dict[str, object], message: str, model: Path, tmp_path: Path
) -> None:
    change_config(model, **changes)
    assert message in refusal(buddy_pipeline(*ask(model), cache=tmp_path / "cache"))


def test_a_tokenizer_of_another_model_is_one_line(model: Path, cache: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["H"] = 300
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refusal(buddy_pipeline(*ask(model), cache=cache))
    assert line.startswith("the tokenizer made token 300, but the model knows only 261")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"max_token_ln": 5}, "unknown key 'max_token_ln': did you mean 'max_token_len'?"),
        ({"variant": "f33"}, "variant 'f33' is unknown: did you mean 'f32'?"),
        ({"max_token_len": 4}, "the prompt has 5 tokens, but the context holds 4"),
        ({"max_token_len": 4000}, "max_token_len is 4000, but the model has 128 positions"),
        ({"weights_override": {"total": 5}}, "weights_override.total is 5, but"),
    ],
)
def test_a_spec_that_is_wrong_is_one_line(
    spec: dict[str, object], message: str, model: Path, cache: Path
) -> None:
    (model / "spec.json").write_text(json.dumps({"hf_model_path": str(model), **spec}))
    assert message in refusal(buddy_pipeline(*ask(model), cache=cache))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "f33"], "variant 'f33' is unknown"),
        (["--split", "2,1"], "split 2,1 names 2 ranks, but the pipeline has 1"),
        (["--split", "2"], "split 2 sums to 2 layers, but the model has 3"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * 129], "the prompt has 129 tokens, but the context holds 128"),
        (["--local-model", ""], "'--local-model': it is empty: give a path"),
        (["--local-model", "nowhere"], "--local-model nowhere does not exist"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json cannot be written"),
    ],
)
def test_an_option_that_is_wrong_is_one_line(
    arguments: list[str], message: str, model: Path, cache: Path
) -> None:
    assert message in refusal(buddy_pipeline(*ask(model), *arguments, cache=cache))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"\xff\xfe", "is not UTF-8 text: save it as JSON"),
        (b"{", "is not valid JSON"),
        (b"[]", "must hold a list of messages"),
        (b'[{"role": "user"}]', "content of message 0 is None"),
    ],
)
def test_a_messages_file_that_is_wrong_is_one_line(
    content: bytes | None, message: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "messages.json"
    if content is not None:
        path.write_bytes(content)
    ended = buddy_pipeline("--spec", model / "spec.json", "--messages", path)
    line = refusal(ended)
    assert line.startswith(f"--messages {path}") and message in line


def test_a_cache_folder_that_cannot_be_made_is_one_line(model: Path) -> None:
    line = refusal(buddy_pipeline(*ask(model), cache=model / "config.json"))
    assert "config.json' cannot be used: " in line and "--cache-dir" in line


@needs_mpi
@pytest.mark.mpi
def test_a_world_with_more_ranks_than_layers_runs(model: Path, cache: Path, tmp_path: Path) -> None:
    alone = answer(tmp_path / "alone.json", *ask(model), cache=cache)
    crowded = answer(tmp_path / "crowded.json", *ask(model), ranks=6, cache=cache)
    assert crowded["token_ids"] == alone["token_ids"]
