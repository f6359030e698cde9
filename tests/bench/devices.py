"""A model on several devices, each a worker with one core: speed of one query, throughput, memory.

    python tests/bench/devices.py                                        SmolLM2 on one and two workers
    python tests/bench/devices.py --model 1.1b --quant q8 --queries 8 --json devices.json --plot devices.png
    python tests/bench/devices.py --model smollm2 --quant f32 --placements "0;1,0&1,0&1;2&3" --rounds 5
    python tests/bench/devices.py --predicted planned.json --from devices.json

Tokens per second: of one query (speed); of as many as there are stages, so that a step has one row, as in Table 5 of
Inferflow (https://arxiv.org/abs/2401.08294; Falcon-40B on four V100, batches of one), which stands beside it (one a
stage); of --queries together, which share steps (throughput). With --predicted stands beside each what a planner says:
{PLACEMENT: {"speed": tokens/s, "one_a_stage": tokens/s, "throughput": tokens/s}}, or some of these, "0" one device.
A round measures every placement once, each in processes of its own. More workers than cores share them: then a worker
is no device of its own, and the row says so. Memory is a process's most (VmHWM), mapped weights counted, of the
greatest worker, beside that of one device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "bench"
sys.path[:0] = [str(ROOT / "examples"), str(HERE)]

import fetch_smollm2
from models import TINYLLAMA, random_gguf
from rich import box
from rich.console import Console
from rich.table import Table

from llmc.compiler.driver import compile_model
from llmc.compiler.placement import parse_placement

WORK = ROOT / "build" / "bench"
ONE = "0"  # the placement of one device
MEASURES = {"speed": "speed", "one_a_stage": "one a stage", "throughput": "throughput"}
# Tokens per second of one query, and of all devices together, by the kind of a placement.
SEED = {"layer": (8, 32), "tensor": (12, 12), "hybrid": (12, 24)}
SOURCES: dict[str, Callable[[], Path]] = {
    "smollm2": lambda: Path(fetch_smollm2.fetch()),
    "1.1b": lambda: random_gguf(WORK, TINYLLAMA, "q8", Path(fetch_smollm2.fetch())),
}
_RECORDED = ("model", "quant", "queries", "prompt_tokens", "new_tokens", "rounds", "repeats")


@dataclass
class Row:
    """What was measured of a placement. Of MEASURES tokens per second, of every repeat of every round."""

    placement: str
    speed: list[float] = field(default_factory=list)
    one_a_stage: list[float] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # by rank, the most of all rounds

    @property
    def kind(self) -> str:
        """whole, layer, tensor or hybrid."""
        return parse_placement(self.placement).kind

    @property
    def workers(self) -> int:
        """How many devices it has."""
        return sum(map(len, parse_placement(self.placement).stages))

    def add(self, found: Sequence[dict[str, Any]]) -> None:
        """What the processes of one round left, by rank."""
        for measure in MEASURES:
            getattr(self, measure).extend(found[0][measure])
        self.load_s.append(found[0]["load_s"])
        peaks = [each["peak_rss_bytes"] for each in found]
        self.peak_bytes = list(map(max, zip(peaks, self.peak_bytes or peaks, strict=True)))


def measure_once(placement: str, artifact: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What every rank's process leaves. SystemExit, with what it said, where one fails."""
    stages = parse_placement(placement).stages
    count = sum(map(len, stages))
    with tempfile.TemporaryDirectory() as folder:
        asked = {name: getattr(options, name) for name in ("queries", "prompt_tokens", "new_tokens", "repeats")}
        case = json.dumps({**asked, "stages": len(stages), "artifact": str(artifact), "folder": folder})
        launcher = [str(Path(sys.executable).with_name("mpirun")), "-n", str(count)] if count > 1 else []
        command = [*launcher, sys.executable, str(HERE / "devices_case.py"), case]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{placement}: {done.stderr.strip()[-2000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def compiled(placement: str, options: argparse.Namespace) -> Path:
    """The artifact of a placement, made where it is not there yet."""
    name = "".join(c if c.isalnum() else {";": "-", "&": "+"}.get(c, "_") for c in placement)
    path = WORK / f"devices-{options.model}-{options.quant}-{name}.llmc"
    if not (options.keep and path.exists()):
        devices = None if placement == ONE else placement
        compile_model(SOURCES[options.model](), path, quant=options.quant, devices=devices)
    return path


def measure(options: argparse.Namespace, log: Console) -> list[Row]:
    """All placements, by turns, in the other order every other round."""
    placements = [ONE, *(each for each in options.placements if each != ONE)]
    WORK.mkdir(parents=True, exist_ok=True)
    artifacts = {}
    for placement in placements:
        artifacts[placement] = compiled(placement, options)
        log.print(f"{placement}: compiled", highlight=False)
    rows = {placement: Row(placement) for placement in placements}
    for number in range(options.rounds):
        for placement in placements if number % 2 == 0 else placements[::-1]:
            rows[placement].add(measure_once(placement, artifacts[placement], options))
        log.print(f"round {number + 1} of {options.rounds} done")
    return list(rows.values())


def table(rows: Sequence[Row], predicted: dict[str, dict[str, float]], title: str) -> Table:
    """A line for each placement, measured, predicted, or both."""
    cores = len(os.sched_getaffinity(0))
    shown = Table(title=title)
    rates = [head for measure in MEASURES.values() for head in (measure, "of one", "predicted", "off")]
    heads = ["placement", "kind", *rates, "peak MB", "of one", "Inferflow's speed", "throughput"]
    kept = [number for number, head in enumerate(heads) if predicted or head not in ("predicted", "off")]
    for number in kept:
        shown.add_column(heads[number], justify="right" if number > 1 else "left")
    one = next((row for row in rows if row.placement == ONE), Row(ONE))
    known = {row.placement: row for row in rows}
    for placement in dict.fromkeys([*known, *predicted]):
        row = known.get(placement, Row(placement))
        kind = row.kind if row.workers <= cores or not row.speed else f"{row.kind}, {row.workers} on {cores} cores"
        cells = [
            cell for measure in MEASURES for cell in _rate(row, one, measure, predicted.get(placement, {}).get(measure))
        ]
        line = [placement, kind, *cells, *_memory(row, one), *map(str, SEED.get(row.kind, ("", "")))]
        shown.add_row(*(line[number] for number in kept))
    return shown


def _rate(row: Row, one: Row, measure: str, predicted: float | None) -> list[str]:
    """Median and spread, times that of one device, what was predicted, and how far that is off."""
    values, of = getattr(row, measure), getattr(one, measure)
    guess = "" if predicted is None else f"{predicted:.1f}"
    if not values:
        return ["", "", guess, ""]
    middle = statistics.median(values)
    spread = (max(values) - min(values)) / 2 / middle
    times = f"{middle / statistics.median(of):.2f}" if of else ""
    return [f"{middle:.1f} ±{spread:.0%}", times, guess, "" if predicted is None else f"{predicted / middle - 1:+.0%}"]


def _memory(row: Row, one: Row) -> list[str]:
    if not row.peak_bytes:
        return ["", ""]
    most = max(row.peak_bytes)
    return [f"{most / 1e6:.0f}", f"{most / max(one.peak_bytes):.0%}" if one.peak_bytes else ""]


def draw(rows: Sequence[Row], predicted: dict[str, dict[str, float]], path: Path) -> None:
    """Write a PNG: a bar for each placement and rate, and a mark where it was predicted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(MEASURES), figsize=(11, 3.2), layout="constrained")
    names = list(dict.fromkeys([*(row.placement for row in rows), *predicted]))
    for axis, (measure, name_of) in zip(axes, MEASURES.items(), strict=True):
        measured = [(row.placement, statistics.median(getattr(row, measure))) for row in rows]
        axis.bar([names.index(name) for name, _ in measured], [value for _, value in measured], color="C1")
        guesses = [(name, rates[measure]) for name, rates in predicted.items() if measure in rates]
        if guesses:
            axis.plot([names.index(name) for name, _ in guesses], [value for _, value in guesses], "k_", markersize=18)
        axis.set_xticks(range(len(names)), names)
        axis.set_title(f"{name_of}, tokens/s" + (" (lines: predicted)" if guesses else ""), fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure, or take what was measured; print the table."""
    options = _options()
    if options.source is None:
        rows = measure(options, Console(stderr=True))
        asked = {name: getattr(options, name) for name in _RECORDED}
    else:
        whole = json.loads(options.source.read_text())
        rows, asked = [Row(**each) for each in whole["rows"]], whole["asked"]
    predicted = {} if options.predicted is None else json.loads(options.predicted.read_text())
    if options.json:
        options.json.write_text(json.dumps({"asked": asked, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    title = (
        f"{asked['model']} {asked['quant']}, tokens/s of one query, one a stage, {asked['queries']} together: "
        f"{asked['new_tokens']} after {asked['prompt_tokens']}"
    )
    shown = table(rows, predicted, title)
    if options.markdown:
        shown.box, shown.title_justify = box.MARKDOWN, "left"
    Console(width=options.width).print(shown)
    if options.plot:
        draw(rows, predicted, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=SOURCES, default="smollm2")
    add("--quant", default="q8", help="format of the weights, by default q8")
    add("--placements", type=lambda text: text.split(","), default=["0;1", "0&1"], help='by default "0;1,0&1"')
    add("--queries", type=int, default=8, help="of throughput, together; by default 8")
    add("--prompt-tokens", type=int, default=16)
    add("--new-tokens", type=int, default=64)
    add("--rounds", type=int, default=3)
    add("--repeats", type=int, default=2, help="in each process")
    add("--keep", action="store_true", help="use artifacts that are there, whatever compiled them")
    add("--predicted", type=Path, metavar="FILE", help="JSON of a planner's predictions, by placement")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: figures of an earlier --json")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    add("--plot", type=Path, metavar="FILE", help="write a PNG there; needs matplotlib")
    add("--markdown", action="store_true", help="the table as docs have it")
    add("--width", type=int, default=210, help="of the table")
    options = parser.parse_args()
    options.placements = [str(parse_placement(each)) for each in options.placements]
    return options


if __name__ == "__main__":
    main()
