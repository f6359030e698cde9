"""`llmc run`: one prompt, one answer, streamed to standard output."""

from __future__ import annotations

import sys
from typing import Any

import click

from llmc.console import json_option, print_json, progress_bars
from llmc.options import sampling_options, threads_option
from llmc.run_graph import run_graph

# What a terminal would obey if a model wrote it: control characters, less newline and tab.
_OBEYED = {c: "\ufffd" for c in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if c not in (0x09, 0x0A)}


def for_terminal(piece: str) -> str:
    """Return `piece` with the characters that would steer a terminal made visible.

    Text that goes to a file or a pipe is left alone.
    """
    return piece.translate(_OBEYED) if sys.stdout.isatty() else piece


def read_prompt(argument: str | None) -> str:
    """Return the prompt: the argument, or standard input for `-` and for none when piped."""
    if argument is None and sys.stdin.isatty():
        raise click.UsageError("No prompt: give one, or '-' to read standard input.")
    if argument is not None and argument != "-":
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise click.UsageError(f"The prompt is not valid UTF-8: {error.reason}.") from None
        return argument
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"the prompt on standard input is not valid UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
        ) from None


@click.command(
    short_help="Answer one prompt.",
    epilog="""\b
Examples:
  llmc run smollm2.llmc "Give me three tips for staying healthy."
  llmc run smollm2.llmc --raw "Once upon a time" --temperature 0.8 --seed 7
  cat question.txt | llmc run smollm2.llmc - --json
  llmc run graph.llmc --input x=in.npy --output-dir results""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.argument("prompt", metavar="[PROMPT|-]", required=False)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is: no chat template.")
@click.option("--ignore-eos", is_flag=True, help="Go on when the model says it is done.")
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="An input of a compiled graph.")
@click.option("--output-dir", metavar="FOLDER", help="Write the outputs of a graph there, as NAME.npy.")
@sampling_options
@threads_option
@json_option
def run(
    artifact: str,
    prompt: str | None,
    raw: bool,
    ignore_eos: bool,
    inputs: tuple[str, ...],
    output_dir: str | None,
    threads: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer PROMPT with the model in NAME.llmc and stream the text to standard output.

    Where the model has a chat template, the prompt is what a user says in a conversation; with
    --raw it is text to continue. Where it has an encoder, it is the text to answer or translate.
    A prompt of '-' is read from standard input. A compiled graph takes --input instead, once for
    each of its inputs (`llmc inspect` lists them).
    """
    if inputs or output_dir is not None:
        if prompt is not None:
            raise click.UsageError("A prompt and --input: a graph takes arrays, a model of text takes a prompt.")
        run_graph(artifact, inputs, output_dir, threads, as_json)
        return
    text = read_prompt(prompt)
    import llmc.runtime

    with progress_bars() as progress:
        model = llmc.runtime.load(artifact, threads=threads, progress=progress)
    with model:
        sampling["ignore_eos"] = ignore_eos
        if raw or not model.manifest.get("chat_template"):
            stream = model.stream(text, **sampling)
        else:
            stream = model.chat_stream([{"role": "user", "content": text}], **sampling)
        for piece in stream:
            if not as_json:
                click.echo(for_terminal(piece), nl=False)
        result = stream.result
    if not as_json:
        click.echo()
        return
    print_json(
        {
            "text": result.text,
            "ids": result.ids,
            "prompt_ids": result.prompt_ids,
            "finish_reason": result.finish_reason,
            "timings": result.timings,
        }
    )
