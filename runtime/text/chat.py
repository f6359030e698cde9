"""The chat template of a model: a conversation becomes the text that the model was trained to continue."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from llmc.runtime.errors import RequestError
from llmc.runtime.text.control_tokens import RESERVED
from llmc.runtime.text.sandbox import MAX_CHARS, BoundedEnvironment

_MAX_MESSAGES = 10_000
_MAX_FORMAT_CHARS = 200  # of a date format
_ROLE = re.compile(r"[\w .:/-]{1,64}")  # nothing that could be a part of a control token


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special: Mapping[str, str],
    mark: Callable[[str], str] = str,
) -> str:
    """The prompt for `messages` (each with `role` and `content` texts), ending where the assistant begins to speak.

    `special` are the texts of special tokens that templates may name, such as bos_token. `mark` is applied to every
    content first (see `runtime/text/control_tokens.py`). What templates expect is the environment of
    https://huggingface.co/docs/transformers/chat_templating. Raises RequestError for a bad message, and when the
    template refuses the conversation or does not end in time.
    """
    conversation = [{**message, "content": mark(message["content"])} for message in _checked(messages)]
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    variables = {**special, "messages": conversation, "add_generation_prompt": True}
    pieces, size = [], 0
    try:
        for piece in environment.bounded_template(template).generate(variables):
            environment.budget.spend()
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise RequestError(f"chat template: its output is longer than {MAX_CHARS} characters")
    except RequestError:
        raise
    except jinja2.TemplateError as error:
        raise RequestError(f"chat template: {_line(error)}") from error
    except (RecursionError, MemoryError) as error:
        raise RequestError("chat template: it nests too deeply or builds too much") from error
    except Exception as error:  # a template can make any builtin fail
        raise RequestError(f"chat template: {type(error).__name__}: {_line(error)}") from error
    return "".join(pieces)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages: wanted a list of at least one message")
    if len(messages) > _MAX_MESSAGES:
        raise RequestError(f"messages: got {len(messages)}, at most {_MAX_MESSAGES} are taken")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}]: got {type(message).__name__}, wanted a dict")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = type(message[key]).__name__ if key in message else "nothing"
                raise RequestError(f"messages[{index}].{key}: got {got}, wanted text")
        if not _ROLE.fullmatch(message["role"]):
            raise RequestError(f"messages[{index}].role: got {message['role'][:40]!r}, wanted a name such as user")
        if not RESERVED.isdisjoint(message["content"]):
            raise RequestError(f"messages[{index}].content: holds U+FDD0..U+FDD3, which Unicode keeps for programs")
        extra = sorted(str(key) for key in set(message) - {"role", "content"})
        if extra:
            raise RequestError(f"messages[{index}]: unknown keys {', '.join(extra)[:100]}; it takes role and content")
    return [dict(message) for message in messages]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_FORMAT_CHARS:
        raise jinja2.TemplateError("strftime_now: its format is too long")
    return datetime.now().strftime(format)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON, where Jinja's own filter escapes for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise jinja2.TemplateError(f"tojson: indent {indent}")
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    line = getattr(error, "lineno", None)
    return f"{text} (line {line})" if line else text
