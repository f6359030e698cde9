"""`llmc eval`: how well an artifact predicts a text, and how far it is from another artifact."""

from __future__ import annotations

from typing import Any

import click

from llmc.console import json_option, print_json, print_table, progress_bars, words_for_bytes
from llmc.options import for_devices, read_text, threads_option


@click.command(
    "eval",
    short_help="Measure quality on a text.",
    epilog="""\b
Examples:
  llmc eval smollm2.llmc --text wiki.test.raw
  llmc eval smollm2.llmc --text novel.txt --against smollm2-f32.llmc --windows 40 --json""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.option("--text", "text_file", required=True, metavar="FILE", help="UTF-8 text to predict.")
@click.option(
    "--window", type=click.IntRange(2), default=512, show_default=True, metavar="N", help="Tokens of a window."
)
@click.option("--against", metavar="OTHER.llmc", help="Compare with this, usually the unquantized compile.")
@click.option("--windows", type=click.IntRange(1), metavar="N", help="Stop after this many windows.")
@click.option(
    "--bos",
    type=click.Choice(["auto", "yes", "no"]),
    default="auto",
    show_default=True,
    help="Begin each window with the model's first token (it takes the place of one token and is not scored); "
    "auto: if NAME.llmc begins prompts with it. A model trained that way is lost without it.",
)
@threads_option
@json_option
@for_devices
def eval_command(
    artifact: str,
    text_file: str,
    window: int,
    against: str | None,
    windows: int | None,
    bos: str,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure how well NAME.llmc predicts the text in FILE: its perplexity.

    The text is tokenized once and cut into disjoint windows. All tokens of a window but the first
    are scored, each after those before it; a last window that is too short is dropped. With
    --against also the KL divergence (nats) of NAME.llmc's predictions from OTHER.llmc's, and how
    often both think the same token likeliest. Standard errors (+/-) take tokens as independent.
    """
    text = read_text(text_file)
    import llmc.runtime

    paths = [artifact] if against is None else [artifact, against]
    if against is not None and "devices" in llmc.runtime.inspect(against):
        raise click.ClickException(f"{against}: compiled for several devices; --against wants an artifact for one")
    with progress_bars() as progress:
        models = [llmc.runtime.load(path, threads=threads, progress=progress) for path in paths]
        result = models[0].evaluate(text, window, *models[1:], most_windows=windows, bos=bos, progress=progress)
    figures = result.figures()
    sizes = [_sizes(path, llmc.runtime.inspect(path)) for path in paths]
    if as_json:
        other = {"against": sizes[1]} if against is not None else {}
        print_json({**sizes[0], "text": text_file, **figures, **other})
        return
    _print(sizes, text_file, figures)


def _sizes(path: str, manifest: dict[str, Any]) -> dict[str, Any]:
    quantization = manifest["quantization"]
    return {
        "artifact": path,
        "format": quantization["format"],
        "bits_per_weight": quantization["bits_per_weight"],
        "bytes": manifest["bytes"],
    }


def _print(sizes: list[dict[str, Any]], text_file: str, result: dict[str, Any]) -> None:
    perplexities = [_with_error(result, "perplexity")]
    bos = ", each after the model's first token" if result["bos"] else ""
    facts = [
        ("text", f"{text_file}, {result['text_tokens']} tokens"),
        ("scored", f"{result['tokens']} tokens, {result['windows']} windows of {result['window']}{bos}"),
        ("speed", f"{result['tokens_per_s']:.0f} tokens/s"),
    ]
    if len(sizes) > 1:
        perplexities.append(_with_error(result, "against_perplexity"))
        facts += [
            ("perplexity ratio", _with_error(result, "perplexity_ratio")),
            ("KL mean", f"{_with_error(result, 'kl', 5)} nats"),
            ("KL median", f"{result['kl_median']:.5f}"),
            ("KL 99 %", f"{result['kl_99_percent']:.5f}"),
            ("KL max", f"{result['kl_max']:.5f}"),
            ("same first choice", _percent(result)),
        ]
    about = [
        ("artifact", *(size["artifact"] for size in sizes)),
        ("weights", *(f"{size['format']}, {size['bits_per_weight']:.2f} bits per weight" for size in sizes)),
        ("size", *(words_for_bytes(size["bytes"]) for size in sizes)),
        ("perplexity", *perplexities),
    ]
    if len(sizes) == 1:
        print_table([*about, *facts])
        return
    print_table(about)
    click.echo()
    print_table(facts)


def _with_error(result: dict[str, Any], name: str, digits: int = 4) -> str:
    error = result[f"{name}_standard_error"]
    return f"{result[name]:.{digits}f}" + ("" if error is None else f" +/- {error:.{digits}f}")


def _percent(result: dict[str, Any]) -> str:
    error = result["top1_standard_error"]
    return f"{result['top1_agreement']:.2%}" + ("" if error is None else f" +/- {error:.2%}")
