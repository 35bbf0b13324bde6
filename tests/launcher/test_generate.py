"""The generation loop: why it ends, what text leaves it, what the engine is asked."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.launcher.generate import Request, Token, generate, generate_all
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.sampling import SamplingOptions
from tests.launcher.fakes import FakeEngine, FakeTokenizer, scripted

PROMPT = list(b"prompt")


def run(engine: FakeEngine, top_logits: int = 0, **options: object) -> list[Token]:
    sampling = SamplingOptions(**options)  # type: ignore[arg-type]
    request = Request(PROMPT, sampling, top_logits)
    return list(generate(engine, FakeTokenizer(), request))  # type: ignore[arg-type]


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def test_an_end_of_sequence_token_ends_it_and_has_no_text() -> None:
    tokens = run(scripted("hello"))
    assert [token.id for token in tokens] == [*b"hello", 256]
    assert text_of(tokens) == "hello"
    assert [token.finish_reason for token in tokens] == [None] * 5 + ["eos"]


def test_ignore_eos_goes_on_and_spells_control_tokens() -> None:
    tokens = run(FakeEngine([*b"a", 256, *b"b"]), max_tokens=3, ignore_eos=True)
    assert text_of(tokens) == "a<eos>b"
    assert tokens[-1].finish_reason == "length"


def test_every_token_but_the_last_is_fed_back_once_at_its_position() -> None:
    engine = scripted("hello")
    run(engine)
    assert list(map(bytes, engine.seen)) == [b"prompthello"]


def test_max_tokens_ends_it() -> None:
    tokens = run(scripted("hello"), max_tokens=3)
    assert text_of(tokens) == "hel"
    assert tokens[-1].finish_reason == "length"


@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_full_context_ends_it_after_the_token_that_needs_no_place(room: int) -> None:
    engine = scripted("hello")
    engine.context_length = len(PROMPT) + room
    tokens = run(engine)
    assert text_of(tokens) == "hello"[: room + 1]
    assert tokens[-1].finish_reason == "length"


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths() -> None:
    engine = scripted("hello")
    engine.context_length = 5
    with pytest.raises(UserError, match="6 tokens, but the context holds 5"):
        run(engine)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        next(generate(scripted("a"), FakeTokenizer(), Request([], SamplingOptions())))  # type: ignore[arg-type]


def test_a_stop_text_that_spans_tokens_ends_it_and_none_of_it_comes_out() -> None:
    pieces: list[str] = []
    for token in run(scripted("one, two, three"), stop=("x", "o, t")):
        pieces.append(token.text)
    assert "".join(pieces) == "one, tw"
    assert not any("o, " in piece for piece in pieces)


def test_text_that_only_began_like_a_stop_text_comes_out_after_all() -> None:
    tokens = run(scripted("say STO"), stop=("STOP",))
    assert text_of(tokens) == "say STO"
    assert tokens[-1].finish_reason == "eos"


def test_the_token_that_completes_a_stop_text_is_the_last() -> None:
    tokens = run(scripted("ab.cd"), stop=(".",))
    assert [token.id for token in tokens] == [*b"ab."]
    assert tokens[-1].finish_reason == "stop"


def test_a_character_cut_off_by_the_length_becomes_a_replacement() -> None:
    tokens = run(scripted("é"), max_tokens=1)
    assert text_of(tokens) == "\ufffd"


def test_top_logits_come_with_the_first_token_only_best_first() -> None:
    tokens = run(scripted("hello"), top_logits=3)
    assert tokens[0].top_logits == ((ord("h"), 9.0), (256, 1.0), (255, pytest.approx(255 / 256)))
    assert all(token.top_logits == () for token in tokens[1:])


def test_requests_run_together_and_each_gets_its_own_text_and_reason() -> None:
    engine = scripted("hello")
    options = [SamplingOptions(), SamplingOptions(max_tokens=2), SamplingOptions(stop=("l",))]
    requests = [Request(PROMPT, each) for each in options]
    texts, reasons = ["", "", ""], [None, None, None]
    order: list[int] = []
    for number, token in generate_all(engine, FakeTokenizer(), requests):  # type: ignore[arg-type]
        texts[number] += token.text
        reasons[number] = token.finish_reason  # type: ignore[call-overload]
        order.append(number)
    assert texts == ["hello", "he", "he"]
    assert reasons == ["eos", "length", "stop"]
    assert order[:4] == [0, 1, 0, 1], "two run at once"
    assert engine.running == []


def test_requests_are_taken_only_as_the_engine_has_use_for_them() -> None:
    engine = scripted("hello")
    taken = 0

    def requests() -> Iterator[Request]:
        nonlocal taken
        while taken < 100:
            taken += 1
            yield Request(PROMPT, SamplingOptions())

    tokens = generate_all(engine, FakeTokenizer(), requests())  # type: ignore[arg-type]
    next(tokens)
    assert taken == 2 * engine.max_sequences


def test_who_stops_listening_ends_all_sequences() -> None:
    engine = scripted("hello")
    requests = [Request(PROMPT, SamplingOptions())] * 3
    tokens = generate_all(engine, FakeTokenizer(), requests)  # type: ignore[arg-type]
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert engine.running == []


stop_lists = st.lists(st.text("abé", min_size=1, max_size=3), max_size=3)


@given(text=st.text("abé", max_size=12), stops=stop_lists)
def test_the_first_stop_text_to_be_complete_ends_it_and_the_text_stops_before_it(
    text: str, stops: list[str]
) -> None:
    tokens = run(scripted(text), stop=tuple(stops))
    expected, reason = text, "eos"
    for length in range(1, len(text) + 1):
        begins = [at for stop in stops if (at := text[:length].find(stop)) >= 0]
        if begins:
            expected, reason = text[: min(begins)], "stop"
            break
    assert text_of(tokens) == expected
    assert tokens[-1].finish_reason == reason
