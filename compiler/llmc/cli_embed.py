"""`llmc embed` and `llmc fill`: what encoders are for, vectors of texts and the words behind masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmc.cli_run import read_prompt
from llmc.console import json_option, print_json, print_table, progress_bars
from llmc.options import read_text, threads_option

_SHOWN_TEXT = 40  # characters of a text in a table


@click.command(
    short_help="Turn texts into vectors.",
    epilog="""\b
Examples:
  llmc embed minilm.llmc "a cat" "a kitten" "a bus"
  llmc embed minilm.llmc --lines questions.txt --output questions.npy
  llmc embed minilm.llmc --lines - --json < questions.txt""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("--lines", metavar="FILE", help="Texts, one a line; '-' reads standard input.")
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the model reads.")
@click.option("--output", "-o", metavar="FILE.npy", help="Write the vectors there, float32, one a row.")
@threads_option
@json_option
def embed(
    artifact: str, texts: tuple[str, ...], lines: str | None, truncate: bool, output: str | None, threads: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print a vector for each TEXT, or how near each text is to the first one.

    The model is an encoder that was compiled with a pooling, such as a sentence-transformers folder.
    """
    wanted = [*texts, *(_lines(lines) if lines is not None else [])]
    if not wanted:
        raise click.UsageError("No text: give some, or --lines FILE.")
    import numpy as np

    with _load(artifact, threads) as model:
        vectors = model.embed(wanted, truncate=truncate)
    if output is not None:
        _save(Path(output), vectors)
    if as_json:
        print_json({"dimensions": vectors.shape[1], "vectors": vectors.tolist()})
        return
    lengths = np.linalg.norm(vectors, axis=1)
    near = vectors @ vectors[0] / np.maximum(lengths * lengths[0], 1e-12)
    rows = [
        (text if len(text) <= _SHOWN_TEXT else text[: _SHOWN_TEXT - 1] + "…", f"{cosine:.3f}", f"{length:.3f}")
        for text, cosine, length in zip(wanted, near, lengths, strict=True)
    ]
    print_table(rows, ("text", "cosine to the first", "length"), f"{len(wanted)} x {vectors.shape[1]} numbers")


@click.command(
    short_help="Say what may stand behind a mask.",
    epilog="""\b
Examples:
  llmc fill bert.llmc "Paris is the capital of [MASK]." --top 3""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.argument("text", metavar="[TEXT|-]", required=False)
@click.option("--top", type=click.IntRange(1, 1000), default=5, show_default=True, help="Tokens for each mask.")
@threads_option
@json_option
def fill(artifact: str, text: str | None, top: int, threads: int | None, as_json: bool) -> None:
    """Print the likeliest tokens for each mask in TEXT, by a masked language model."""
    prompt = read_prompt(text)
    with _load(artifact, threads) as model:
        found = model.fill(prompt, top=top)
    if as_json:
        plain = [
            [{"id": guess.id, "token": guess.token, "probability": guess.probability} for guess in guesses]
            for guesses in found
        ]
        print_json({"masks": plain})
        return
    for number, guesses in enumerate(found, 1):
        rows = [(guess.token, f"{guess.probability:.1%}") for guess in guesses]
        print_table(rows, ("token", "probability"), f"mask {number} of {len(found)}")


def _load(artifact: str, threads: int | None) -> Any:
    import llmc.runtime

    with progress_bars() as progress:
        return llmc.runtime.load(artifact, threads=threads, progress=progress)


def _lines(path: str) -> list[str]:
    text = read_prompt("-") if path == "-" else read_text(path)
    return [line for line in text.splitlines() if line.strip()]


def _save(path: Path, vectors: Any) -> None:
    """Written aside and renamed: a file that is there is whole."""
    import numpy as np

    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.save(file, vectors)
    part.replace(path)
