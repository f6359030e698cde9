"""`llmc chat`: a conversation, at a terminal or over pipes."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import click

from llmc.cli_run import as_record, for_terminal
from llmc.console import json_option, progress_bars
from llmc.decoding_options import GroupedCommand, decoding_options, given
from llmc.options import copy_weights_option, draft_model_option, drafts_option, for_devices, threads_option

Message = dict[str, str]

_HELP = "/reset forgets the conversation, /save FILE and /load FILE keep it, /exit leaves, Ctrl-C stops an answer."


@click.command(
    cls=GroupedCommand,
    short_help="Hold a conversation.",
    epilog="""\b
Examples:
  llmc chat smollm2.llmc
  llmc chat smollm2.llmc --system "Answer in one sentence." --temperature 0.7
  printf 'My name is Ada.\\nWhat is my name?\\n' | llmc chat smollm2.llmc""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@threads_option
@drafts_option
@draft_model_option
@copy_weights_option
@json_option
@decoding_options("n")
@for_devices
def chat(
    artifact: str, system: str | None, threads: int | None, drafts: int | None, draft_model: str | None,
    copy_weights: bool | None, as_json: bool, **decoding: Any,
) -> None:  # fmt: skip
    """Talk with the model in NAME.llmc; it remembers what was said before.

    /reset forgets the conversation, /save FILE writes it to a file with what the model has read of
    it, /load FILE goes on with such a file, /exit leaves, /help says so. When standard input is no
    terminal, each line is a message and each answer ends with a newline; with --json each answer
    is one JSON object on one line.
    """
    options = given(decoding, as_json)
    import llmc.runtime

    with progress_bars() as progress:
        model = llmc.runtime.load(
            artifact, threads=threads, drafts=drafts, draft_model=draft_model, copy_weights=copy_weights,
            progress=progress,
        )  # fmt: skip
    with model:
        if not model.manifest.get("chat_template"):
            raise click.ClickException(
                f"{artifact}: this model has no chat template, so it cannot hold a conversation; "
                f"`llmc run {artifact} PROMPT` continues a text"
            )
        _converse(model, system, as_json, options)


def _converse(model: Any, system: str | None, as_json: bool, options: dict[str, Any]) -> None:
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
        click.echo(_HELP, err=True)
    while (line := _next_line(interactive)) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
        elif line == "/help":
            click.echo(_HELP, err=True)
        elif line.split(" ")[0] in ("/save", "/load"):
            messages = _kept(model, line, messages, interactive)
        elif line:
            messages.append({"role": "user", "content": line})
            reply = _answer(model, messages, as_json, interactive, options)
            messages.append({"role": "assistant", "content": reply})


def _kept(model: Any, line: str, messages: list[Message], interactive: bool) -> list[Message]:
    """Do what `line` says, /save FILE or /load FILE; the conversation after it.

    What goes wrong is said at a terminal, and ends the command elsewhere.
    """
    from llmc.runtime import LlmcError

    command, _, path = line.partition(" ")
    try:
        if not path.strip():
            raise LlmcError(f"{command}: wanted the name of a file behind it")
        if command == "/load":
            _, note = model.load_session(path.strip())
            return _conversation(path.strip(), note)
        if not messages:
            raise LlmcError("/save: nothing was said yet")
        model.save_session(path.strip(), model.chat_prompt(messages), note=json.dumps(messages))
    except LlmcError as error:
        if not interactive:
            raise
        click.echo(f"llmc: {error}", err=True)
    return messages


def _conversation(path: str, note: str) -> list[Message]:
    """The messages that /save wrote. Raises LlmcError for a session that is none of a conversation."""
    from llmc.runtime import LlmcError

    try:
        messages = json.loads(note)
        good = all(set(m) == {"role", "content"} and all(isinstance(v, str) for v in m.values()) for m in messages)
    except (ValueError, TypeError, AttributeError, RecursionError):
        good = False
    if not good or not isinstance(messages, list):
        raise LlmcError(f"{path}: a session, but not of a conversation")
    return messages


def _next_line(interactive: bool) -> str | None:
    """Return the next message without blanks around it, or None at the end of the input."""
    if interactive:
        try:
            return input("> ").strip()
        except EOFError:
            click.echo()
            return None
    raw = sys.stdin.buffer.readline()
    if not raw:
        return None
    try:
        return raw.decode().strip()
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"a line on standard input is not valid UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
        ) from None


def _answer(
    model: Any,
    messages: list[dict[str, str]],
    as_json: bool,
    interactive: bool,
    options: dict[str, Any],
) -> str:
    """Print the answer as it is made and return its text; Ctrl-C at a terminal keeps the part."""
    stream = model.chat_stream(messages, **options)
    pieces: list[str] = []
    try:
        for piece in stream:
            pieces.append(piece)
            if not as_json:
                click.echo(for_terminal(piece), nl=False)
    except KeyboardInterrupt:
        if not interactive:
            raise
        stream.close()
        click.echo()
        return "".join(pieces)
    result = stream.result
    if as_json:
        click.echo(json.dumps(as_record(model, result, "text", "ids", "finish_reason", "timings")))
    else:
        click.echo()
    if result.finish_reason == "context":
        click.echo("llmc: the conversation fills the model's context; /reset starts anew", err=True)
    return str(result.text)
