"""Tables and the plot of what compare.py measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from compare_figures import RATES, ROWS, Figure, Row, best_peer, costs, equal_bits, times_better
from rich import box
from rich.console import Console
from rich.table import Table

MEASURES = (*RATES, "first token s", "peak MB", "peak/held", "busy")
COMPARED = (*RATES, "first token s", "peak MB")
MADE = ("compile s", "compile MB", "compile / source", "artifact MB", "bits/weight", "KL", "same choice")


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Everything, as tables; those without a row are left out."""
    for case, found in _cases(rows):
        yield _figures(f"{case}: tokens per second, median ±spread", found)
        ratios = _ratios(f"{case}: llmc is so many times better", found)
        if ratios.row_count:
            yield ratios
        cost = _costs(f"{case}: t(M)/t(1), a step of M rows over one", found)
        if cost.row_count:
            yield cost
    made = _made(rows)
    if made.row_count:
        yield made


def _cases(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """What ran on so many threads, by its model and that number in words."""
    for (model, threads), found in groupby(rows, key=lambda row: (row.model, row.threads)):
        if threads:
            yield f"{model}, {threads} thread{'s' if threads > 1 else ''}", list(found)


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    return table


def _figures(title: str, rows: Sequence[Row]) -> Table:
    heads = [head for head in MEASURES if any(row.value(head) for row in rows)]
    table = _table(title, ["", "bits", "KL", *heads, "of read limit"])
    for row in rows:
        cells = [words(row.figures.get(head), "%" if head == "busy" else "") for head in heads]
        limit = "" if row.of_limit is None else f"{row.of_limit:.0%}"
        loss = row.value("KL")
        table.add_row(row.system, _number(row.value("bits/weight")), _number(loss), *cells, limit)
    return table


def _ratios(title: str, rows: Sequence[Row]) -> Table:
    """Over each peer, of our formats the one with as many bits; then all of them over the best peer of each measure."""
    heads = [head for head in COMPARED if any(row.value(head) for row in rows)]
    table = _table(title, ["", "ours", *heads])
    for peer in (row for row in rows if not row.ours):
        ours = equal_bits(peer, rows)
        if ours is not None:
            table.add_row(f"than {peer.system}", ours.system, *(_times(times_better(ours, peer, h)) for h in heads))
    best = {head: peer for head in heads if (peer := best_peer(rows, head))}
    if best:
        table.add_section()
        table.add_row("the best peer", "", *(best[head].system if head in best else "" for head in heads))
        for ours in (row for row in rows if row.ours):
            cells = [_times(times_better(ours, best[head], head)) if head in best else "" for head in heads]
            table.add_row("than the best peer", ours.system, *cells)
    return table


def _costs(title: str, rows: Sequence[Row]) -> Table:
    table = _table(title, ["", *(f"M={m}" for m in ROWS)])
    for row in rows:
        found = costs(row)
        if found:
            table.add_row(row.system, *(_times(found.get(m)) for m in ROWS))
    return table


def _made(rows: Sequence[Row]) -> Table:
    table = _table("compile, with every core", ["", *MADE])
    for row in rows:
        if row.ours and not row.threads and any(row.value(name) for name in ("compile s", "KL")):
            table.add_row(f"{row.model} {row.system}", *(_number(row.value(name)) for name in MADE))
    return table


def words(figure: Figure | None, unit: str = "") -> str:
    """A figure in a cell, with its spread where it is of several samples.

    >>> words(Figure(1234.4, 0.04, 3)), words(Figure(0.25, 0, 1)), words(None)
    ('1234 ±2%', '0.25', '')
    >>> words(Figure(0.55, 0, 1), "%")
    '55%'
    """
    if figure is None:
        return ""
    text = f"{figure.median:.0%}" if unit == "%" else _number(figure.median)
    return text if figure.count == 1 else f"{text} ±{figure.spread / 2:.0%}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def show(rows: Sequence[Row], console: Console, markdown: bool = False) -> None:
    """Print all tables."""
    for table in tables(rows):
        if markdown:
            table.box, table.title_justify = box.MARKDOWN, "left"
            for line in table.rows:
                line.end_section = False
        console.print(table)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: a bar for each system and rate, and the cost of M rows, for each model and number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = list(_cases(rows))
    if not found:
        return
    columns = (*RATES, "t(M) / t(1)")
    figure, axes = plt.subplots(
        len(found), len(columns), figsize=(3.4 * len(columns), 3.4 * len(found)), squeeze=False, layout="constrained"
    )
    for line, (name, case) in zip(axes, found, strict=True):
        for axis, measure in zip(line, RATES, strict=False):
            known = [(row, value) for row in case if (value := row.value(measure))][::-1]
            axis.barh(
                [row.system for row, _ in known], [value for _, value in known],
                color=["C1" if row.ours else "C7" for row, _ in known],
            )  # fmt: skip
            axis.set_title(f"{name}: {measure}, tokens/s", fontsize=8)
            axis.tick_params(labelsize=7)
        for row in case:
            if row.ours and (cost := costs(row)):
                line[-1].plot(list(cost), list(cost.values()), marker="o", label=row.system)
        line[-1].set_title("step of M rows over one row", fontsize=8)
        line[-1].set_xticks(ROWS)
        if line[-1].lines:
            line[-1].legend(fontsize=7)
        line[-1].tick_params(labelsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
