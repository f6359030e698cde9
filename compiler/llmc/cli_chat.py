"""`llmc chat`: a conversation, at a terminal or over pipes."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import click

from llmc.cli_run import for_terminal
from llmc.console import json_option, progress_bars
from llmc.options import sampling_options, threads_option

_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."


@click.command(
    short_help="Hold a conversation.",
    epilog="""\b
Examples:
  llmc chat smollm2.llmc
  llmc chat smollm2.llmc --system "Answer in one sentence." --temperature 0.7
  printf 'My name is Ada.\\nWhat is my name?\\n' | llmc chat smollm2.llmc""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@sampling_options
@threads_option
@json_option
def chat(artifact: str, system: str | None, threads: int | None, as_json: bool, **sampling: Any) -> None:
    """Talk with the model in NAME.llmc; it remembers what was said before.

    /reset forgets the conversation, /exit leaves, /help says so. When standard input is no
    terminal, each line is a message and each answer ends with a newline; with --json each answer
    is one JSON object on one line.
    """
    import llmc.runtime

    with progress_bars() as progress:
        model = llmc.runtime.load(artifact, threads=threads, progress=progress)
    with model:
        if not model.manifest.get("chat_template"):
            raise click.ClickException(
                f"{artifact}: this model has no chat template, so it cannot hold a conversation; "
                f"`llmc run {artifact} PROMPT` continues a text"
            )
        _converse(model, system, as_json, sampling)


def _converse(model: Any, system: str | None, as_json: bool, sampling: dict[str, Any]) -> None:
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
        elif line:
            messages.append({"role": "user", "content": line})
            reply = _answer(model, messages, as_json, interactive, sampling)
            messages.append({"role": "assistant", "content": reply})


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
    sampling: dict[str, Any],
) -> str:
    """Print the answer as it is made and return its text; Ctrl-C at a terminal keeps the part."""
    stream = model.chat_stream(messages, **sampling)
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
        answer = {"text": result.text, "ids": result.ids, "finish_reason": result.finish_reason}
        click.echo(json.dumps({**answer, "timings": result.timings}))
    else:
        click.echo()
    if result.finish_reason == "context":
        click.echo("llmc: the conversation fills the model's context; /reset starts anew", err=True)
    return str(result.text)
