"""The prompt as the user gave it, and the token ids it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buddy_pipeline.partition.errors import UserError

if TYPE_CHECKING:
    from buddy_pipeline.launcher.chat import Message
    from buddy_pipeline.launcher.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptSource:
    """Exactly one of `text`, `file` and `messages`; UserError otherwise."""

    text: str | None = None
    file: Path | None = None
    """A UTF-8 text file."""
    messages: Path | None = None
    """A JSON file, see `chat.read_messages`."""
    raw: bool = False
    """The text is the prompt itself, without the model's chat template."""

    def __post_init__(self) -> None:
        given = [
            option
            for option, value in (
                ("--prompt", self.text),
                ("--prompt-file", self.file),
                ("--messages", self.messages),
            )
            if value is not None
        ]
        if not given:
            raise UserError("there is no prompt: give --prompt, --prompt-file or --messages")
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} exclude each other: give one of them")
        if self.raw and self.messages is not None:
            raise UserError("--raw and --messages exclude each other: messages need the template")


def encode_prompt(source: PromptSource, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the prompt: the text itself with `raw`, else the chat template's.

    Raises UserError for a file that cannot be read, an empty prompt, a model without a chat
    template, and a template that refuses the messages.
    """
    if source.messages is None:
        return encode_text(_read_text(source), tokenizer, raw=source.raw)
    from buddy_pipeline.launcher.chat import read_messages

    return encode_messages(read_messages(source.messages), tokenizer)


def encode_text(text: str, tokenizer: Tokenizer, *, raw: bool) -> list[int]:
    """Token ids of a text, the prompt itself with `raw`, else what a user says in a chat."""
    if not text:
        raise UserError("the prompt is empty: give some text")
    if raw:
        return tokenizer.encode(_checked(text))
    if tokenizer.chat_template is None:
        raise UserError("the model has no chat template: pass --raw to give it the prompt as it is")
    return encode_messages([{"role": "user", "content": text}], tokenizer)


def encode_messages(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation, up to where the answer begins."""
    # Jinja takes longer to import than a raw prompt to encode.
    from buddy_pipeline.launcher.chat import render_chat

    if tokenizer.chat_template is None:
        raise UserError("the model has no chat template for --messages: use --prompt with --raw")
    text = render_chat(tokenizer.chat_template, messages, tokenizer.special_tokens)
    return tokenizer.encode(_checked(text), add_special=False)


def _read_text(source: PromptSource) -> str:
    if source.file is None:
        assert source.text is not None  # one of the three is there
        return source.text
    try:
        text = source.file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--prompt-file {source.file} cannot be read ({error.strerror}): give a text file"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--prompt-file {source.file} is not UTF-8 text: convert it") from None
    # Editors end a file with a newline that nobody means to ask the model about.
    return text.removesuffix("\n")


def _checked(text: str) -> str:
    # Python reads bytes of the command line that are not UTF-8, and JSON's \ud800, as surrogates.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the prompt has {text[error.start]!r} at character {error.start}, which is not a"
            " character of Unicode text: give the prompt as UTF-8"
        ) from None
    return text
