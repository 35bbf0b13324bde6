"""Chat templates: rendered as the models expect, sandboxed, and their failures explained."""

import json
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.launcher.chat import read_messages, render_chat
from buddy_pipeline.launcher.prompt import PromptSource, encode_prompt
from buddy_pipeline.partition.errors import UserError
from tests.launcher.fakes import FakeTokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def render(template: str, messages: Any = HELLO, **special: str) -> str:
    return render_chat(template, messages, special)


def test_messages_special_tokens_and_the_opening_of_the_answer_are_there() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert render(template, bos_token="<s>") == "<s><user>Hello<assistant>"


def test_blocks_on_their_own_lines_leave_no_space() -> None:
    assert render(
        "{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}"
    ) == ("x\n")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{% set ns = namespace(x=1) %}{% for m in messages %}{% set ns.x = 2 %}{% endfor %}"
         "{{ ns.x }}", "2"),
        ("{{ dict(a=1).a }}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if tools %}tools{% endif %}", ""),
    ],
)  # fmt: skip
def test_what_templates_of_hugging_face_rely_on_works(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only one\nmessage') }}", "refused the messages: only one message"),
        ("{% if %}", "has an error at line 1"),
        ("{{ missing.x }}", "refused the messages: 'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "refused the messages: can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ dict.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "'__class__' is not allowed"),
        ("{{ range(10000000) | length }}", "too big"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_one_line(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        render(template)
    assert "\n" not in str(caught.value)


@pytest.fixture
def messages_file(tmp_path: Path) -> Path:
    return tmp_path / "messages.json"


def test_messages_may_carry_more_than_role_and_content(messages_file: Path) -> None:
    messages = [{"role": "system", "content": "", "name": "x"}, *HELLO]
    messages_file.write_text(json.dumps(messages), encoding="utf-8")
    assert read_messages(messages_file) == messages


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a list of messages"),
        ('{"role": "user"}', "must hold a list of messages"),
        ('["Hello"]', "message 0 is 'Hello'"),
        ('[{"role": "user", "content": "a"}, {"content": "b"}]', "role of message 1 is None"),
        ('[{"role": "user", "content": ["a"]}]', r"content of message 0 is \['a'\]"),
    ],
)
def test_a_wrong_messages_file_names_the_entry(
    content: str, message: str, messages_file: Path
) -> None:
    messages_file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        read_messages(messages_file)


def encoded(tokenizer: FakeTokenizer | None = None, **source: Any) -> str:
    ids = encode_prompt(PromptSource(**source), tokenizer or FakeTokenizer())  # type: ignore[arg-type]
    return bytes(ids).decode()


def test_the_newline_at_the_end_of_a_prompt_file_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n", encoding="utf-8")
    assert encoded(file=file) == "[user]two\nlines"
    assert encoded(file=file, raw=True) == "two\nlines"


def test_a_model_without_a_template_asks_for_raw() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = None
    assert encoded(tokenizer, text="Hello", raw=True) == "Hello"
    with pytest.raises(UserError, match="no chat template: pass --raw"):
        encoded(tokenizer, text="Hello")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"text": ""}, "the prompt is empty"),
        ({"text": "a\udcff"}, r"the prompt has '\\udcff' at character 7"),
        ({"text": "a\udcff", "raw": True}, r"the prompt has '\\udcff' at character 1"),
        ({"file": Path("none.txt")}, r"--prompt-file none\.txt cannot be read \(No such file"),
        ({"messages": Path("none.json")}, r"--messages none\.json cannot be read \(No such file"),
        ({}, "there is no prompt"),
        ({"text": "a", "file": Path("b")}, "--prompt and --prompt-file exclude each other"),
        ({"messages": Path("b"), "raw": True}, "--raw and --messages exclude each other"),
    ],
)
def test_a_prompt_that_is_not_there_is_an_error(source: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        encoded(**source)
