"""What the commands share: JSON on standard output, tables, progress bars, sizes in words."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")


class Progress(Protocol):
    """What long steps report to: a stage's name, how much is done, out of how much."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...


# stage name as reported -> what a user reads
_STAGES = {
    "fetch": "fetching the model",
    "read": "reading the model",
    "passes": "rewriting the graph",
    "weights": "packing weights",
    "library": "generating code",
    "write": "writing the artifact",
    "verify files": "checking files",
    "verify weights": "checking weights",
    "score": "scoring windows",
    "translate": "translating texts",
    "original": "loading the original",
    "calibrate": "reading the calibration text",
    "sensitivity": "trying each matrix",
    "check": "comparing with the original",
}


def need_compiler(what: str) -> None:
    """Refuse in one line where only the thin runtime is installed."""
    missing = [name for name in ("tvm", "gguf") if find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"`llmc {what}` needs the compiler, which is not installed here (no "
            f"{' and no '.join(missing)}): pip install 'llmc[compile]'"
        )


def print_json(value: Any) -> None:
    """Print one JSON document; text that is not ASCII is escaped, so any terminal will do."""
    click.echo(json.dumps(value, indent=2))


def print_table(rows: Iterable[Sequence[str]], columns: Sequence[str] = (), title: str | None = None) -> None:
    """Print rows of text; with `columns` a table with a header, without a plain two-column list."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=bool(columns), box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        # Text, not str: a name in square brackets is a name here, not markup.
        table.add_row(*(Text(_visible(cell)) for cell in row))
    if sys.stdout.isatty():
        Console(highlight=False).print(table)
        return
    with (console := Console(width=160, highlight=False)).capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Draw stages as bars on standard error while they run; silent when that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_words_for_stage(stage), total=max(total, 1))
            bars.update(tasks[stage], completed=done, total=max(total, 1))

        yield report


def _words_for_stage(stage: str) -> str:
    """Return what a user reads; "library cpu-avx2" is the stage "library" of one of several."""
    kind, _, which = stage.partition(" ")
    if stage in _STAGES or kind not in _STAGES:
        return _STAGES.get(stage, stage)
    return f"{_STAGES[kind]} for {which}"


def words_for_bytes(count: float) -> str:
    """Return a size in decimal units, as disks and networks count.

    >>> words_for_bytes(98_362_432)
    '98.4 MB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def words_for_loss(loss: dict[str, Any]) -> str:
    """Return what a compile measured, in words.

    >>> words_for_loss({"kl": 0.0030277, "top1_agreement": 0.9726, "tokens": 256})
    'KL 0.0030, same first choice 97.3% (over 256 tokens)'
    """
    if "cosine" in loss:
        return f"cosine {loss['cosine']:.4f} to the original's vectors (over {loss['tokens']} tokens)"
    return f"KL {loss['kl']:.4f}, same first choice {loss['top1_agreement']:.1%} (over {loss['tokens']} tokens)"
