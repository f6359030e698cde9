"""`llmc translate`: texts in, what an encoder-decoder makes of each out, one a line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import click

from llmc.cli_run import as_record, for_terminal, read_prompt
from llmc.console import json_option, print_json, progress_bars
from llmc.decoding_options import GroupedCommand, decoding_options, given
from llmc.options import copy_weights_option, drafts_option, for_devices, read_text, threads_option


@click.command(
    cls=GroupedCommand,
    short_help="Translate texts, or what else a model with an encoder does.",
    epilog="""\b
Examples:
  llmc translate m2m100.llmc --from en --to fr "The house is wonderful." "Good morning."
  llmc translate t5.llmc --lines novel.txt > roman.txt
  llmc translate t5.llmc "translate English to German: Good morning."
  echo "The house is wonderful." | llmc translate opus-mt-en-de.llmc""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--from", "source", metavar="LANGUAGE", help="What the texts are in, as `llmc inspect` names it.")
@click.option("--to", "target", metavar="LANGUAGE", help="What to translate them into.")
@click.option("--lines", metavar="FILE", help="Texts, one a line; '-' reads standard input.")
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the model reads.")
@threads_option
@drafts_option
@copy_weights_option
@json_option
@decoding_options("n", "Text without end")
@for_devices
def translate(
    artifact: str, texts: tuple[str, ...], source: str | None, target: str | None, lines: str | None, truncate: bool,
    threads: int | None, drafts: int | None, copy_weights: bool | None, as_json: bool, **decoding: Any,
) -> None:  # fmt: skip
    """Translate each TEXT with the model in NAME.llmc, and print a line for each.

    The model has an encoder, such as M2M100, MarianMT, BART or T5; one that knows many languages
    wants --from and --to. Without a TEXT, the lines of standard input are the texts. A blank line
    stays one, so line N is always the translation of line N.
    """
    wanted = _texts(texts, lines)
    options = given(decoding, as_json)
    import llmc.runtime

    with progress_bars() as progress:
        model = llmc.runtime.load(
            artifact, threads=threads, drafts=drafts, copy_weights=copy_weights, progress=progress
        )  # fmt: skip
    with model:
        said = [text for text in wanted if text.strip()]
        parts = model.translate_parts(said, source, target, truncate, **options) if said else iter(())
        alone = len(wanted) == 1 and not as_json
        done = _stream(model, parts) if alone else _print_lines(model, _in_order(parts), wanted, as_json)
    if as_json:
        print_json({"translations": done})
        return
    cut = sum(each["finish_reason"] != "stop" for each in done)
    if cut and sys.stderr.isatty():
        click.echo(f"llmc: {cut} of {len(said)} cut short; --max-tokens lets them be longer", err=True)


def _texts(texts: tuple[str, ...], lines: str | None) -> list[str]:
    """TEXT..., then the lines of --lines or, without either, of standard input."""
    if lines is None and not texts and sys.stdin.isatty():
        raise click.UsageError("No text: give some, or --lines FILE.")
    if texts == ("-",) or (lines is None and not texts):
        texts, lines = (), "-"
    found = [text if text == "-" else read_prompt(text) for text in texts]
    if lines is not None:
        read = read_prompt("-") if lines == "-" else read_text(lines)
        found += [line.removesuffix("\r") for line in read.removesuffix("\n").split("\n")] if read else []
    if not found:
        raise click.UsageError("No text: what was given is empty.")
    return found


def _in_order(parts: Iterable[Any]) -> Iterator[Any]:
    """The whole of each text, in the order of the texts, as soon as it and all before it are there."""
    whole: dict[int, Any] = {}
    number = 0
    for part in parts:
        if part.done is not None:
            whole[part.index] = part.done
        while number in whole:
            yield whole.pop(number)
            number += 1


def _stream(model: Any, parts: Iterable[Any]) -> list[dict[str, Any]]:
    """Print the only text as it is made."""
    done = []
    for part in parts:
        click.echo(for_terminal(part.text), nl=False)
        if part.done is not None:
            done.append(_entry(model, part.done))
    click.echo()
    return done


def _print_lines(model: Any, results: Iterator[Any], wanted: list[str], as_json: bool) -> list[dict[str, Any]]:
    """Print a line for each text, unless JSON is wanted. At a terminal the lines themselves show how far it is."""
    done: list[dict[str, Any]] = []
    seen = not as_json and sys.stdout.isatty()
    with nullcontext(lambda *_: None) if seen else progress_bars() as progress:
        for text in wanted:
            blank = {"text": "", "ids": [], "finish_reason": "stop"}
            done.append(_entry(model, next(results)) if text.strip() else blank)
            if not as_json:
                click.echo(for_terminal(" ".join(done[-1]["text"].splitlines())))
            progress("translate", len(done), len(wanted))
    return done


def _entry(model: Any, result: Any) -> dict[str, Any]:
    if result.error:
        raise click.ClickException(result.error)
    return as_record(model, result, "text", "ids", "finish_reason")
