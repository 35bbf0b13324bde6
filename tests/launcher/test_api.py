"""The Python API: prompts in any form become answers, in order or as they come."""

from typing import Any

import pytest

from buddy_pipeline.launcher import api
from buddy_pipeline.launcher.api import Pipeline
from buddy_pipeline.launcher.settings import Balance
from buddy_pipeline.partition.errors import UserError
from tests.launcher.fakes import FakeSession, scripted


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    fake = FakeSession(scripted("Hello"))
    monkeypatch.setattr(api, "open_session", fake.open)
    return fake


def test_answers_are_in_the_order_of_the_prompts(session: FakeSession) -> None:
    prompts = ["a text", [{"role": "user", "content": "messages"}], [1, 2, 3]]
    with Pipeline.from_spec("s") as pipeline:
        results = pipeline.generate(prompts, max_tokens=3)
    assert [bytes(result.prompt_ids) for result in results] == [
        b"[user]a text",
        b"[user]messages",
        b"\1\2\3",
    ]
    assert [result.text for result in results] == ["Hel"] * 3


def test_a_stream_gives_tokens_one_by_one(session: FakeSession) -> None:
    with Pipeline.from_spec("s") as pipeline:
        stream = pipeline.stream("x", raw=True, top_logits=1)
        assert next(stream).top_logits == ((ord("H"), 9.0),)
        assert "".join(token.text for token in stream) == "ello"


def test_nothing_to_answer_is_no_answer(session: FakeSession) -> None:
    with Pipeline.from_spec("s") as pipeline:
        assert pipeline.generate([]) == []


def test_settings_have_the_names_of_the_options(session: FakeSession) -> None:
    with Pipeline.from_spec(
        "s", variant="f32", split=[1, 2], max_sequences=3, step_timeout_s=9.0, cache_dir="c"
    ):
        settings = session.settings
    assert session.library
    assert (settings.spec, settings.variant, settings.split) == ("s", "f32", (1, 2))
    assert (settings.max_sequences, settings.step_timeout_s) == (3, 9.0)


def test_number_formats_are_those_of_the_command_line(session: FakeSession) -> None:
    with Pipeline.from_spec("s", variant="gguf", exact=True, kv_cache_dtype="int8"):
        assert (session.settings.exact, session.settings.kv_cache_dtype) == (True, "int8")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ("x", {"top_k": -1}, "top_k is -1"),
        ([1] * 1001, {}, "1001 tokens, but the context holds 1000"),
        ([500], {}, "token 500, but the model knows only 257"),
        ([-1], {}, "token -1: tokens are numbers of 0 or more"),
        ([1, "x"], {}, "message 0 is 1: give an object"),
        (None, {}, "prompt is None: give a text, messages or token ids"),
        ("x", {"max_tokns": 3}, "option 'max_tokns' is unknown: did you mean 'max_tokens'?"),
        ("x", {"top_logits": -1}, "top_logits is -1"),
        ("x", {"max_tokens": 2.5}, "max_tokens is 2.5: it must be a whole number"),
        ("x", {"temperature": "hot"}, "temperature is 'hot': it must be a number"),
    ],
)
def test_mistakes_are_exceptions_that_the_program_can_catch(
    prompt: Any, options: dict[str, Any], message: str, session: FakeSession
) -> None:
    with Pipeline.from_spec("s") as pipeline:
        with pytest.raises(UserError, match=message):
            pipeline.generate([prompt], **options)
        assert pipeline.generate(["x"])[0].text == "Hello"


def test_another_rank_serves_and_leaves_the_program(session: FakeSession) -> None:
    session.engine = None
    with pytest.raises(SystemExit) as leaving, Pipeline.from_spec("s"):
        pytest.fail("only rank 0 goes on")
    assert leaving.value.code == 0
    assert session.served


def test_a_pipeline_that_is_closed_says_so(session: FakeSession) -> None:
    with Pipeline.from_spec("s") as pipeline:
        assert pipeline.generate(["x"])
    for use in (pipeline.generate, pipeline.stream):
        with pytest.raises(UserError, match="the pipeline is not open"):
            use(["x"] if use == pipeline.generate else "x")


def test_one_text_in_place_of_a_list_of_prompts_is_refused(session: FakeSession) -> None:
    with Pipeline.from_spec("s") as pipeline, pytest.raises(UserError, match="give a list of"):
        pipeline.generate("one text")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 0}, "threads is 0: it must be 1 or more"),
        ({"max_sequences": 2.5}, "max_sequences is 2.5: it must be a whole number"),
        ({"kv_memory_bytes": "2G"}, "kv_memory_bytes is '2G': it must be a whole number"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s is inf: it must be a finite number"),
        ({"variant": 5}, "variant is 5: it must be a text"),
        ({"variant": ["f32"]}, "variant is .'f32'.: it must be a text"),
        ({"kv_cache_dtype": 5}, "kv_cache_dtype is 5: it must be a text"),
        ({"exact": "no"}, "exact is 'no': it must be true or false"),
        ({"split": 5}, "split is 5: give the number of layers of each rank"),
        ({"split": ["a"]}, "split is 'a': it must be a whole number"),
        ({"balance": "fair"}, "balance is 'fair': give one of even, memory, measured"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pipeline.from_spec("s", **settings)


def test_a_balance_may_be_given_by_its_name(session: FakeSession) -> None:
    with Pipeline.from_spec("s", balance="memory"):
        assert session.settings.balance is Balance.MEMORY


def test_streams_may_be_read_by_turns_and_left_in_the_middle(session: FakeSession) -> None:
    with Pipeline.from_spec("s") as pipeline:
        left = pipeline.stream("left")
        assert next(left).text == "H"
        one, other = pipeline.stream("one", max_tokens=2), pipeline.stream("other", max_tokens=2)
        texts = [(a.text, b.text) for a, b in zip(one, other, strict=True)]
        assert [len(pair) for pair in texts] == [2, 2]
        assert len(pipeline.generate(["x", "y"], max_tokens=2)) == 2
        left.close()
        assert session.engine is not None
        assert not session.engine.running
