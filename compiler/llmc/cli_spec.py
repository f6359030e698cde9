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
  llmc spec model.gguf -o model.toml
  llmc spec model.gguf --check model.toml""",
)
@click.argument("model", metavar="MODEL")
@click.option("-o", "--output", metavar="FILE", help="Write the spec to FILE, which must not be there yet.")
@click.option("--check", "check", metavar="FILE", help="Say whether FILE fits the model's weights, and what differs.")
@click.option("--revision", metavar="NAME", help="Of a model hf:org/name: its branch, tag or commit.")
@json_option
def spec(model: str, output: str | None, check: str | None, revision: str | None, as_json: bool) -> None:
    """Print the spec of MODEL, a GGUF file, a Hugging Face folder or hf:org/name, as TOML.

    With --check, FILE must be a valid spec that accounts for every weight of the model; the
    places where it differs from the model's own spec are listed, which is no error. A model
    that has no spec of its own, because llmc does not know its family, is checked all the same.
    """
    need_compiler("spec")
    if revision is not None:
        from llmc.frontends.hub import with_revision

        model = with_revision(model, revision)
    if check is None:
        _show(model, output, as_json)
    elif output is None:
        _check(model, check, as_json)
    else:
        raise click.UsageError("--check writes nothing; leave out -o")


def _show(model: str, output: str | None, as_json: bool) -> None:
    from llmc.compiler.spec import to_dict, to_toml
    from llmc.frontends.source import open_model

    if output is not None and Path(output).exists():  # someone may have edited it
        raise click.ClickException(f"{output}: is there already; remove it or give another name")
    with open_model(model) as own:
        found = own.spec
    if output is not None:
        Path(output).write_text(to_toml(found), encoding="utf-8")
    if as_json:
        print_json(to_dict(found) if output is None else {"path": output})
    elif output is None:
        click.echo(to_toml(found), nl=False)


def _check(model: str, file: str, as_json: bool) -> None:
    from llmc.compiler.driver.request import read_spec
    from llmc.compiler.errors import LlmcError
    from llmc.compiler.spec import to_dict
    from llmc.frontends.source import open_model

    wanted = read_spec(Path(file))
    try:
        open_model(model, spec=wanted).close()
    except LlmcError as error:
        raise LlmcError(f"{file}: {error}") from error
    refusal = None
    rows: list[tuple[str, Any, Any]] = []
    try:
        with open_model(model) as own:
            rows = differences(to_dict(own.spec), to_dict(wanted))
    except LlmcError as error:
        refusal = str(error)
    if as_json:
        names = ("key", "model", "file")
        found = {"fits": True, "differences": [dict(zip(names, row, strict=True)) for row in rows]}
        print_json(found if refusal is None else found | {"no_own_spec": refusal})
        return
    if refusal is not None:
        click.echo(f"{file}: fits {model}, which has no spec of its own: {refusal}")
        return
    click.echo(f"{file}: fits {model}" + (", with other values:" if rows else ", same values"))
    for key, ours, theirs in rows:
        click.echo(f"  {key} = {theirs!r}, the model says {ours!r}")


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
