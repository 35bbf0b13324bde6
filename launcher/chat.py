"""Messages to the one text a chat model was trained on, by the model's own Jinja template.

A template is code from a stranger: it runs in Jinja's immutable sandbox. Settings, filters and
globals are those that templates are written for, Hugging Face transformers'
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from buddy_pipeline.launcher.json_text import read_json
from buddy_pipeline.partition.errors import UserError

Message = Mapping[str, Any]
"""`role` and `content`, both texts, and whatever else the template reads."""


def render_chat(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]
) -> str:
    """The prompt text of a conversation, up to where the assistant's answer begins.

    `special_tokens` are texts by name, such as `bos_token`. Raises UserError when the template is
    wrong or refuses the messages.
    """
    try:
        return (
            _environment()
            .from_string(template)
            .render(
                messages=messages,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **special_tokens,
            )
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the model's chat template has an error at line {error.lineno}: {error.message}:"
            " pass --raw and write the prompt as the model expects it"
        ) from None
    # The template's own code fails in whatever way it likes: a filter on a missing value is a
    # TypeError, a too large range an OverflowError.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"the model's chat template refused the messages: {reason}: change them or pass --raw"
        ) from None


def read_messages(path: Path) -> list[Message]:
    """The messages of a JSON file: a list of objects with the texts `role` and `content`.

    Raises UserError naming the file and the entry that is wrong.
    """
    messages: list[Message] = read_json(f"--messages {path}", path)
    check_messages(messages, f"--messages {path}")
    return messages


def check_messages(messages: Any, where: str) -> None:
    """Raises UserError, prefixed with `where`, for what is not a list of messages."""
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{where} must hold a list of messages, such as"
            ' [{"role": "user", "content": "Hello"}]'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UserError(f"{where}: message {index} is {message!r}: give an object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UserError(
                    f"{where}: {key} of message {index} is {message.get(key)!r}: give a text"
                )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["namespace"] = _Namespace
    # Jinja's own global is the class, whose attributes lead out of the sandbox.
    environment.globals["dict"] = lambda *args, **entries: dict(*args, **entries)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks words for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without attributes that could reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model never saw in training.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
