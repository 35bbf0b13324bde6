"""The Python API: prompts in any form become answers, in order or as they come."""

import pytest

from buddy_pipeline.launcher import api
from buddy_pipeline.launcher.api import Pipeline
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
    ],
)
def test_mistakes_are_exceptions_that_the_program_can_catch(
    prompt: str | list[int], options: dict[str, int], message: str, session: FakeSession
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
