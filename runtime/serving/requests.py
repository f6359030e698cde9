"""Reads the bodies of requests: OpenAI's fields, and all options of decoding beside them. What is not known is refused.

Fields: https://platform.openai.com/docs/api-reference/chat/create, .../completions/create, .../embeddings/create.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llmc.runtime.decoding.options import Options
from llmc.runtime.errors import RequestError
from llmc.runtime.loading import schema
from llmc.runtime.serving.failures import Refused

Json = dict[str, Any]

MOST_PROMPTS = 256  # of one request, and
MOST_ANSWERS = 256  # to all of them
TEMPERATURE = 1.0  # where a request names none: OpenAI's default

_OPTIONS = {f.name for f in fields(Options) if f.init} - {
    "logprobs", "max_tokens", "prefill_chunk", "endless", "n_keep", "n_discard", "window"
}  # fmt: skip
_COMMON = {"model", "stream", "stream_options", "user", "max_tokens", "logprobs"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "response_format"}
_TEXT = _COMMON | {"prompt", "echo", "best_of"}
# Fields that clients send whatever they want -> the values that ask for nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "modalities": (["text"],), "store": (False,), "metadata": ({},),
    "service_tier": ("auto", "default"), "suffix": ("",),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What a request wants generated.

    prompts: each a text, token ids, or for `chat` the messages. options: how each is continued. streamed: answer piece
    by piece; usage: and with counts of tokens at the end. echo: begin each answer with its prompt. user: whose it is.
    """

    chat: bool
    model: str | None
    prompts: Sequence[Any]
    options: Options
    streamed: bool = False
    usage: bool = False
    echo: bool = False
    user: str = ""


def chat_request(body: Json, most_tokens: int) -> Asked:
    """A conversation to continue. Raises Refused, or RequestError, that names all that is wrong with it."""
    wanted = _known(body, _CHAT | _OPTIONS)
    messages = wanted.pop("messages", None)
    if messages is None:
        raise Refused(400, "messages: missing; it is the conversation, a list of {role, content}", param="messages")
    longest = wanted.pop("max_completion_tokens", None)
    if longest is not None:
        wanted["max_tokens"] = longest
    form = wanted.pop("response_format", None)
    if form is not None:
        wanted.update(_form(form, wanted))
    if "prediction" in wanted:
        wanted["prediction"] = _prediction(wanted["prediction"])
    top, with_logprobs = wanted.pop("top_logprobs", None), _flag(wanted, "logprobs")
    if top is not None and not with_logprobs:
        raise Refused(400, "top_logprobs: it needs logprobs: true", param="top_logprobs")
    logprobs = (top or 0) if with_logprobs else None
    return _asked(True, wanted, [_plain(messages)], logprobs, most_tokens)


def text_request(body: Json, most_tokens: int) -> Asked:
    """Texts to continue. Raises as `chat_request`."""
    wanted = _known(body, _TEXT | _OPTIONS)
    if "prompt" not in wanted:
        raise Refused(400, "prompt: missing; it is a text, token ids, or a list of them", param="prompt")
    prompts = _texts_of(wanted.pop("prompt"), "prompt")
    best_of = wanted.pop("best_of", None)
    if best_of is not None and best_of != wanted.get("n", 1):
        raise Refused(400, f"best_of: got {best_of!r}; only as many as n are made", param="best_of")
    echo = _flag(wanted, "echo")
    logprobs = wanted.pop("logprobs", None)
    if echo and logprobs is not None:
        raise Refused(400, "echo: log-probabilities of a prompt are not served; leave echo or logprobs out")
    return _asked(False, wanted, prompts, logprobs, most_tokens, echo)


def embedding_request(body: Json) -> tuple[str | None, list[Any], bool]:
    """The model, texts or token ids, and whether vectors are wanted in base64. Raises as `chat_request`."""
    wanted = _known(body, {"model", "input", "encoding_format", "user"})
    if "input" not in wanted:
        raise Refused(400, "input: missing; it is a text or a list of texts", param="input")
    form = wanted.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise Refused(400, f"encoding_format: got {form!r}, wanted float or base64", param="encoding_format")
    return _name(wanted), _texts_of(wanted["input"], "input"), form == "base64"


def _texts_of(value: Any, where: str) -> list[Any]:
    """A text, token ids, or a list of either, as a list."""
    listed = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(listed) > MOST_PROMPTS:
        raise Refused(400, f"{where}: got {len(listed)}, at most {MOST_PROMPTS} are taken", param=where)
    for each in listed:
        ids = isinstance(each, list) and each and all(type(id_) is int for id_ in each)
        if not isinstance(each, str) and not ids:
            raise Refused(400, f"{where}: wanted a text, token ids, or a list of them", param=where)
    return listed


def _asked(
    chat: bool, wanted: Json, prompts: list[Any], logprobs: Any, most_tokens: int, echo: bool = False
) -> Asked:  # fmt: skip
    model, user = _name(wanted), wanted.pop("user", "")
    streamed = _flag(wanted, "stream")
    usage = _usage(wanted.pop("stream_options", None), streamed)
    if not isinstance(user, str):
        raise Refused(400, f"user: got {type(user).__name__}, wanted a text", param="user")
    if "logit_bias" in wanted:
        wanted["logit_bias"] = _biases(wanted["logit_bias"])
    if wanted.get("strategy") is None:
        wanted.setdefault("temperature", TEMPERATURE if wanted.get("beams", 1) == 1 else None)
    wanted.setdefault("max_tokens", most_tokens)
    options = Options.of({**wanted, "logprobs": logprobs})
    if options.max_tokens > most_tokens:
        raise Refused(400, f"max_tokens: got {options.max_tokens}, this server makes at most {most_tokens}")
    answers = len(prompts) * max(options.n, options.beams)
    if answers > MOST_ANSWERS:
        raise Refused(
            400, f"n: {answers} answers to {len(prompts)} prompts; at most {MOST_ANSWERS} are made", param="n"
        )
    return Asked(chat, model, prompts, options, streamed, usage, echo, user)


_FORMS = {
    "text": schema.record(type=schema.one_of("text")),
    "json_object": schema.record(type=schema.one_of("json_object")),
    "json_schema": schema.record(type=schema.one_of("json_schema"), json_schema=schema.anything),
}


def _form(value: Any, wanted: Json) -> Json:
    """The options that OpenAI's `response_format` stands for."""
    where = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMS:
        raise Refused(400, f"{where}.type: got {schema.quoted(kind)}, wanted one of {', '.join(_FORMS)}", param=where)
    problems = _FORMS[kind](value, where)
    inner = value.get("json_schema") if kind == "json_schema" else None
    if isinstance(inner, dict):
        problems += [f"{where}.json_schema: unknown key {schema.quoted(key)}" for key in
                     sorted(set(inner) - {"name", "description", "schema", "strict"})]  # fmt: skip
        problems += schema.anything(inner.get("schema"), f"{where}.json_schema.schema")
    if kind != "text" and "json_schema" in wanted:
        problems.append(f"{where}, json_schema: give one of them")
    if problems:
        raise Refused(400, schema.listed(problems), param=where)
    if kind == "text":
        return {}
    return {"json_schema": {"type": "object"} if inner is None else inner["schema"]}


def _prediction(value: Any) -> Any:
    """The text of OpenAI's `prediction`; a plain text is one too."""
    if not isinstance(value, dict):
        return value
    problems = schema.record(type=schema.one_of("content"), content=lambda *_: [])(value, "prediction")
    if problems:
        raise Refused(400, schema.listed(problems), param="prediction")
    content = value["content"]
    return _joined("prediction", "prediction.content", content) if isinstance(content, list) else content


def _known(body: Json, known: set[str]) -> Json:
    """The fields that ask for something. Refuses those that are unknown, or ask for what there is not, all at once."""
    given = {name: value for name, value in body.items() if value is not None}
    faults = []
    for name, value in list(given.items()):
        if name in _IDLE:
            del given[name]
            if not any(type(value) is type(idle) and value == idle for idle in _IDLE[name]):
                faults.append(f"{schema.shown(name)}: {schema.quoted(value)} is not served; leave it out")
        elif name not in known:
            faults.append(f"{schema.shown(name)}: unknown field")
    if faults:
        raise Refused(400, schema.listed(faults))
    return given


def _flag(wanted: Json, name: str) -> bool:
    value = wanted.pop(name, False)
    if not isinstance(value, bool):
        raise Refused(400, f"{name}: got {schema.quoted(value)}, wanted true or false", param=name)
    return value


def _name(wanted: Json) -> str | None:
    model = wanted.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise Refused(400, f"model: got {type(model).__name__}, wanted a name", param="model")
    return model


def _usage(value: Any, streamed: bool) -> bool:
    """Whether counts are wanted at the end of a stream."""
    if value is None:
        return False
    problems = schema.record(include_usage=schema.flag)(value, "stream_options")
    if problems or not streamed:
        raise Refused(400, schema.listed(problems or ["stream_options: it needs stream: true"]), param="stream_options")
    return bool(value["include_usage"])


def _biases(value: Any) -> dict[int, Any]:
    """JSON's keys are texts; the tokens are numbers."""
    if not isinstance(value, Mapping) or not all(key.isascii() and key.isdigit() for key in value):
        raise Refused(400, 'logit_bias: wanted an object of token ids, such as {"17": -100}', param="logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _plain(messages: Any) -> Any:
    """Messages whose content is one text; what OpenAI spells otherwise, and empty fields, put into that form."""
    if not isinstance(messages, list):
        raise Refused(400, "messages: wanted a list of {role, content}", param="messages")
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Any) -> Any:
    if not isinstance(message, dict):
        return message  # the template's reader says what is wrong with it
    plain = {key: value for key, value in message.items() if value is not None and value != []}
    if isinstance(message.get("content"), list):
        plain["content"] = _joined("messages", f"messages[{number}].content", message["content"])
    if plain.get("role") == "developer":  # what newer clients call it
        plain["role"] = "system"
    return plain


def _joined(param: str, where: str, parts: list[Any]) -> str:
    texts = []
    for at, part in enumerate(parts):
        problems = schema.record(type=schema.one_of("text"), text=schema.text)(part, f"{where}[{at}]")
        if problems:
            raise Refused(400, f"{schema.listed(problems)}; this model reads text alone", param=param)
        texts.append(part["text"])
    if not texts:
        raise RequestError(f"{where}: it is empty")
    return "".join(texts)
