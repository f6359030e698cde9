"""`llmc run`: one prompt, one answer, streamed to standard output."""

from __future__ import annotations

import sys
from typing import Any

import click

from llmc.console import json_option, print_json, progress_bars
from llmc.decoding_options import GroupedCommand, decoding_options, given
from llmc.options import copy_weights_option, draft_model_option, drafts_option, for_devices, threads_option
from llmc.run_graph import run_graph

# What a terminal would obey if a model wrote it: control characters, less newline and tab.
_OBEYED = {c: "\ufffd" for c in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if c not in (0x09, 0x0A)}

_BETWEEN = "---"  # a line between several answers


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


def as_record(model: Any, result: Any, *fields: str) -> dict[str, Any]:
    """A generation as JSON: these fields, and its log-probabilities and other answers where it has them."""
    record = {name: getattr(result, name) for name in fields}
    if result.logprobs is not None:
        record["logprobs"] = [
            {**_token(model, choice.token, choice.logprob), "top": [_token(model, *likely) for likely in choice.top]}
            for choice in result.logprobs
        ]
    if result.others:
        record["others"] = [as_record(model, other, "text", "ids", "finish_reason") for other in result.others]
    return record


def _token(model: Any, id_: int, logprob: float) -> dict[str, Any]:
    return {"id": id_, "text": model.decode([id_], special=True), "logprob": logprob}


@click.command(
    cls=GroupedCommand,
    short_help="Answer one prompt.",
    epilog="""\b
Examples:
  llmc run smollm2.llmc "Give me three tips for staying healthy."
  llmc run smollm2.llmc --raw "Once upon a time" --temperature 0.8 --seed 7
  llmc run smollm2.llmc --raw "Once upon a time" --strategy fsd --stop "The end"
  cat question.txt | llmc run smollm2.llmc - --json
  llmc run graph.llmc --input x=in.npy --output-dir results
  llmc run two.llmc --devices "Once upon a time" --raw""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.argument("prompt", metavar="[PROMPT|-]", required=False)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is: no chat template.")
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="An input of a compiled graph.")
@click.option("--output-dir", metavar="FOLDER", help="Write the outputs of a graph there, as NAME.npy.")
@threads_option
@drafts_option
@draft_model_option
@copy_weights_option
@json_option
@decoding_options()
@for_devices
def run(
    artifact: str,
    prompt: str | None,
    raw: bool,
    inputs: tuple[str, ...],
    output_dir: str | None,
    threads: int | None,
    drafts: int | None,
    draft_model: str | None,
    copy_weights: bool | None,
    as_json: bool,
    **decoding: Any,
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
    options = given(decoding, as_json)
    import llmc.runtime

    text = read_prompt(prompt)

    with progress_bars() as progress:
        model = llmc.runtime.load(
            artifact, threads=threads, drafts=drafts, draft_model=draft_model, copy_weights=copy_weights,
            progress=progress,
        )  # fmt: skip
    with model:
        if raw or not model.manifest.get("chat_template"):
            stream = model.stream(text, **options)
        else:
            stream = model.chat_stream([{"role": "user", "content": text}], **options)
        for piece in stream:
            if not as_json:
                click.echo(for_terminal(piece), nl=False)
        result = stream.result
        if as_json:
            print_json(as_record(model, result, "text", "ids", "prompt_ids", "finish_reason", "timings"))
            return
    for other in result.others:
        click.echo(f"\n{_BETWEEN}\n{for_terminal(other.text)}", nl=False)
    click.echo()
