"""`llmc tune`: the knobs of a model's kernels that are the fastest on this machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from llmc.cli_compile import KV_KINDS, QUANTS, target_name
from llmc.console import json_option, need_compiler, print_json, print_table, progress_bars
from llmc.options import threads_option

_COLUMNS = ("kernel", "shape", "rows", "default us", "best us", "gain", "knobs")
_ENOUGH = 0.97  # of the best rate: fewer threads that reach it leave the others their cores


@click.command(
    short_help="Find the fastest knobs for a model's kernels here.",
    epilog="""\b
Examples:
  llmc tune smollm2.llmc -o tuned.json
  llmc tune model.gguf --quant q4 -o tuned.json --minutes 10
  llmc compile model.gguf --quant q4 -o fast.llmc --tuned tuned.json""",
)
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", required=True, metavar="DB.json", help="The database: read where it exists, written.")
@click.option("--trials", type=click.IntRange(1), metavar="N", help="Stop after N measured candidates.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), metavar="M", help="Stop after so many minutes.")
@click.option("--quant", type=click.Choice(QUANTS), metavar="FORMAT", default="auto", help="As for `llmc compile`.")
@click.option("--recipe", metavar="FILE", help="As for `llmc compile`.")
@click.option("--kv", type=click.Choice(KV_KINDS), default="auto", help="As for `llmc compile`.")
@click.option("--activations", type=click.Choice(["auto", "i8", "f32"]), default="auto", help="As for `llmc compile`.")
@click.option("--spec", metavar="FILE", help="As for `llmc compile`.")
@click.option(
    "--target",
    callback=target_name,
    metavar="TARGET",
    default="cpu",
    show_default=True,
    help="What to tune for: a target of `llmc compile` that runs here.",
)
@threads_option
@json_option
def tune(
    source: str, output: str, trials: int | None, minutes: float | None, threads: int | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Measure candidates for the knobs of SRC's kernels and keep the fastest in DB.json.

    SRC is an artifact, or a model as `llmc compile` takes it. Each kernel runs on operands of its real size, at 1, 4,
    32 and 512 rows; knobs never change what it computes, and that is checked. Stop it at any time, or bound it by
    --trials or --minutes: started again, it goes on where it was. For an artifact, the best number of threads is
    measured too. Then compile with --tuned DB.json.
    """
    need_compiler("tune")
    from llmc.read_speed import last_level_cache_bytes
    from llmc.runtime.loading.cpu import default_threads
    from llmc.runtime.loading.library import without_torch

    with without_torch():
        from llmc.compiler.driver.request import Request
        from llmc.compiler.driver.tuning.search import Budget
        from llmc.compiler.driver.tuning.tune import tune_model

    most = default_threads()
    for name in ("spec", "recipe"):
        options[name] = None if options[name] is None else Path(options[name])
    request = Request(source, Path(output), **options)
    budget = Budget(trials, None if minutes is None else 60 * minutes)
    with _progress() as (report, stages):
        result = tune_model(
            request, Path(output), threads=min(threads or most, most), cold_bytes=4 * last_level_cache_bytes(),
            budget=budget, report=report, progress=stages,
        )  # fmt: skip
    best = _best_threads(source, most) if result.complete and _is_whole(Path(source)) else None
    if best is not None:
        from llmc.compiler.driver.tuning.tune import note_threads

        note_threads(Path(output), result.target, result.model, best)
    if as_json:
        print_json({**result.as_dict(), "path": output, "threads": best})
        return
    _show(result, output, best)


def _show(result: Any, output: str, best: dict[str, int] | None) -> None:
    """Print the table of kernels, and what can be done next."""
    print_table([cells for kernel in result.rows() for cells in _cells(kernel)], columns=_COLUMNS)
    rows = [("trials", f"{result.trials} in {result.seconds:.0f} s"), ("database", output)]
    undecided = sum(kernel["state"] == "unfinished" for kernel in result.rows())
    if undecided:
        rows.append(("unfinished", f"{undecided} of {len(result.kernels)} kernels; the same command goes on with them"))
    if best is not None:
        rows.append(("threads", f"{best['decode']} for answers, {best['prefill']} for prompts (run, serve: --threads)"))
    print_table(rows)


def _cells(kernel: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return a line of the table for each number of rows."""
    name = " ".join(filter(None, (kernel["op"], kernel["format"])))
    if kernel["state"] != "tuned":
        yield (name, kernel["shape"], "", "", "", "", kernel["reason"] or kernel["state"])
        return
    knobs = _words({knob: value for knob, value in kernel["knobs"].items() if kernel["default"][knob] != value})
    for number, (rows, times) in enumerate(kernel["microseconds"].items()):
        first = number == 0
        gain = f"{times['default'] / times['best'] - 1:+.1%}"
        lead = (name, kernel["shape"]) if first else ("", "")
        yield (*lead, rows, f"{times['default']:.1f}", f"{times['best']:.1f}", gain, knobs if first else "")


def _words(knobs: dict[str, int]) -> str:
    """Return knobs and their values as text.

    >>> _words({"prefetch_bytes": 8192, "row_block": 64})
    'prefetch_bytes 8192, row_block 64'
    """
    return ", ".join(f"{knob} {value}" for knob, value in knobs.items())


def _is_whole(source: Path) -> bool:
    """Whether the source is an artifact with its weights; kernels can be tuned of one that has none."""
    return (source / "manifest.json").is_file() and (source / "weights.safetensors").is_file()


def _best_threads(artifact: str, most: int) -> dict[str, int] | None:
    """Return the fewest threads that are as fast as any, for decoding and for prompts; None with one core."""
    from llmc.cli_bench import worker

    counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128) if count < most] + [most]
    if most == 1:
        return None
    case = {"artifact": artifact, "batch": 1, "prompt_tokens": 256, "new_tokens": 48, "repeats": 3}
    with progress_bars() as progress:
        rows = []
        for done, count in enumerate(counts):
            progress("measuring", done, len(counts))
            rows.append(worker({**case, "threads": count}))
    return {kind: _fewest(counts, [max(row[kind]) for row in rows]) for kind in ("decode", "prefill")}


def _fewest(counts: list[int], rates: list[float]) -> int:
    """Return the first count whose rate is about the best.

    >>> _fewest([1, 2, 4], [10.0, 19.9, 20.0])
    2
    """
    return next(count for count, rate in zip(counts, rates, strict=True) if rate >= _ENOUGH * max(rates))


@contextlib.contextmanager
def _progress() -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Draw where the search is as one line on standard error; silent when that is no terminal."""
    if not sys.stderr.isatty():
        yield (lambda state: None), (lambda stage, done, total: None)
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("reading the model", total=None)

        def report(state: Any) -> None:
            knobs = _words(state.changed) or "the default"
            text = f"{state.title}: best {state.gain - 1:+.1%}, {knobs}"
            bars.update(task, description=text)

        yield report, (lambda stage, done, total: None)
