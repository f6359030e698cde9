"""`llmc spec`: what a model is made of, as the TOML that `llmc compile --spec` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmc.console import json_option, need_compiler, print_json


@click.command(
    short_help="Show a model as a spec.",
    epilog="""\b
Examples:
  llmc spec model.gguf > model.toml
  llmc spec model.gguf --check model.toml""",
)
@click.argument("model", metavar="MODEL")
@click.option("--check", "check", metavar="FILE", help="Say where FILE differs from the model's own spec.")
@json_option
def spec(model: str, check: str | None, as_json: bool) -> None:
    """Print the spec of MODEL, a GGUF file or a Hugging Face folder, as TOML.

    With --check, FILE must be a valid spec that accounts for every weight of the model; the
    places where it differs from the model's own spec are listed, which is no error.
    """
    need_compiler("spec")
    from llmc.compiler.spec import from_toml, to_dict, to_toml
    from llmc.frontends.source import open_model

    own = open_model(model)
    try:
        if check is None:
            if as_json:
                print_json(to_dict(own.spec))
            else:
                click.echo(to_toml(own.spec), nl=False)
            return
        wanted = from_toml(_read(check))
        open_model(model, spec=wanted).close()
        rows = list(differences(to_dict(own.spec), to_dict(wanted)))
    finally:
        own.close()
    if as_json:
        names = ("key", "model", "file")
        print_json({"fits": True, "differences": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    click.echo(f"{check}: fits {model}" + (", with other values:" if rows else ", same values"))
    for key, ours, theirs in rows:
        click.echo(f"  {key} = {theirs!r}, the model says {ours!r}")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path}: not UTF-8 at byte {error.start}") from None


def differences(ours: Any, theirs: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, our value, their value) for every leaf that differs.

    >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    [('a.c', 2, 3)]
    """
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if ours == theirs else [(key, ours, theirs)]
    rows: list[tuple[str, Any, Any]] = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        dotted = f"{key}.{name}" if key else str(name)
        rows += differences(ours.get(name), theirs.get(name), dotted)
    return rows
