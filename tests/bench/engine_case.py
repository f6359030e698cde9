"""What the benches of the engine share: the model, real text to ask about, and how figures are put together."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import fetch_smollm2
from rich.console import Console
from rich.table import Table
from texts import CALIBRATION, austen

Row = dict[str, Any]
Found = TypeVar("Found")


class Clock:
    """Seconds that count. On one thread that is the time the CPU works for this process, whatever else it does."""

    def __init__(self, threads: int) -> None:
        self._time = time.process_time if threads == 1 else time.perf_counter
        self._skipped = 0.0

    def now(self) -> float:
        """Seconds since some moment."""
        return self._time() + self._skipped

    def wait_until(self, moment: float) -> None:
        """Let the time pass until then."""
        if self._time is time.process_time:
            self._skipped += max(0.0, moment - self.now())
        else:
            time.sleep(max(0.0, moment - self.now()))


def arguments(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """A parser of what every bench takes: --artifact, --threads, --json, and a number for each of `defaults`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, help="a compiled model; by default SmolLM2 with q4 weights is made")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    return parser


def with_artifact(given: Path | None, measure: Callable[[Path], Found], layer_groups: int | None = None) -> Found:
    """`measure` of the given artifact, or of one that is made for it."""
    if given is not None:
        return measure(given)
    from llmc.compiler.driver import compile_model

    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "smollm2.llmc"
        compile_model(fetch_smollm2.fetch(), artifact, quant="q4", layer_groups=layer_groups)
        return measure(artifact)


def novel_ids(model: Any, tokens: int) -> list[int]:
    """The first tokens of a novel."""
    ids: list[int] = model.encode(austen(CALIBRATION)[: 8 * tokens])
    assert len(ids) >= tokens
    return ids[:tokens]


def show(title: str, rows: Sequence[Row], as_json: bool) -> None:
    """Print rows of the same keys as a table, or as JSON."""
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=title)
    for head in rows[0]:
        table.add_column(head.replace("_", " "), justify="left" if isinstance(rows[0][head], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


def medians(rounds: Sequence[dict[str, Row]]) -> list[Row]:
    """A row for each name: the median of every number over the rounds; texts are those of the first round."""
    rows = []
    for name, first in rounds[0].items():
        found = {
            key: value if isinstance(value, str) else statistics.median(one[name][key] for one in rounds)
            for key, value in first.items()
        }
        rows.append({"": name, **found})
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed.

    >>> [percentile([3, 1, 2, 4], share) for share in (0.5, 0.75, 0.99)]
    [2, 3, 4]
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
