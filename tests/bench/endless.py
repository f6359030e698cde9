"""Text without end in a cache of 1,024 tokens: perplexity over a novel, memory, cost of a token, drift of shifted keys.

    python tests/bench/endless.py text      each way over 20,000 tokens, against windows that are read anew
    python tests/bench/endless.py speed     decode steps of each way and of a text of fixed length, in turn
    python tests/bench/endless.py drift     keys after many shifts by one, against one turn by as much

SmolLM2-135M-Instruct with q4 weights unless --artifact says otherwise; "Emma" (texts.py). A window that is read anew
is a text of its own; that is done for one block of 16 tokens in 16, since all of them would take hours.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import fetch_smollm2
import numpy as np
from engine_case import Row, arguments, novel_ids, show, with_artifact
from numpy.typing import NDArray

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.kv_pages import KINDS
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.window import Window, spare_slots, window_of
from llmc.runtime.loading.manifest import PAGE_TOKENS
from llmc.runtime.runner import Feed, Output, Runner

WAYS = {
    "sinks": {"endless": "sinks"},
    "sinks 1": {"endless": "sinks", "n_discard": 1},
    "no sinks": {"endless": "sinks", "n_keep": 0},
    "shift": {"endless": "shift"},
    "shift 1": {"endless": "shift", "n_discard": 1},
    "reevaluate": {"endless": "reevaluate"},
}
USUAL = ["sinks", "no sinks", "shift", "reevaluate"]
BLOCK = 16  # tokens whose losses are compared with those of a window read anew
ANEW, TAIL = "window read anew", 2000
FIXED = "fixed length"
DRIFTING = 32  # tokens whose keys are shifted


def losses(output: Output, targets: list[int]) -> NDArray[np.float64]:
    """Nats that each target costs, (R,)."""
    rows = np.arange(len(targets))
    return (output.normalizers[rows] - output.logits[rows, targets]).astype(np.float64)


def read_endless(runner: Runner, ids: list[int], window: Window) -> tuple[NDArray[np.float64], Row]:
    """The loss of every token after the first, and what it took."""
    sequence, found, pages, start, memory = runner.new_sequence(), [], 0, time.perf_counter(), 0.0
    at = 0
    while at < len(ids) - 1:
        again = window.make_room(runner, sequence, lambda at=at: ids[:at])
        if again:
            runner.prefill([(sequence, again)])
        count = min(window.rows(sequence), PAGE_TOKENS, len(ids) - 1 - at)
        output = runner.step([Feed(sequence, ids[at : at + count], "all")])
        found.append(losses(output, ids[at + 1 : at + 1 + count]))
        pages = max(pages, len(sequence.pages))
        if at < TAIL <= at + count:
            memory = resident_mb()
        at += count
    runner.release(sequence)
    seconds = time.perf_counter() - start
    return np.concatenate(found), {"pages": pages, "growth_mb": resident_mb() - memory, "tokens_per_s": at / seconds}


def read_anew(runner: Runner, ids: list[int], size: int, starts: range) -> NDArray[np.float64]:
    """Losses of ids[s + 1..s + BLOCK] for each start s, each block at the end of a window that is a text of its own."""
    found = []
    for start in starts:
        sequence = runner.new_sequence()
        runner.prefill([(sequence, ids[max(0, start + BLOCK - size) : start])])
        output = runner.step([Feed(sequence, ids[start : start + BLOCK], "all")])
        found.append(losses(output, ids[start + 1 : start + 1 + BLOCK]))
        runner.release(sequence)
    return np.concatenate(found)


def text(artifact: Path, tokens: int, cache: int, every: int, ways: list[str]) -> list[Row]:
    """A row for each way: perplexity of all tokens, of the first and last TAIL, and of the blocks that are compared."""
    with llmc.load(artifact, cache_tokens=cache, drafts=0) as model:
        ids = novel_ids(model, tokens + 1)
        size = cache - spare_slots("sinks", 4, turned=True)
        starts = range(size, tokens - BLOCK, BLOCK * every)
        blocks = np.concatenate([np.arange(start, start + BLOCK) for start in starts])
        base = read_anew(model.runner, ids, size, starts)
        rows: list[Row] = [{"": ANEW, "blocks": perplexity(base), "ratio": 1.0}]
        for way in ways:
            window = window_of(Options(**WAYS[way], window=size), model.runner)
            cost, facts = read_endless(model.runner, ids, window)
            gap = cost[blocks] - base
            row = {
                "": way, "blocks": perplexity(cost[blocks]), "ratio": math.exp(gap.mean()),
                "ratio_error": gap.std() / len(gap) ** 0.5, "all": perplexity(cost), "first": perplexity(cost[:TAIL]),
                "last": perplexity(cost[-TAIL:]), "finite": str(np.isfinite(cost).all()),
                **facts,
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
        return [{key: row.get(key, "") for key in rows[-1]} for row in rows]


def speed(artifact: Path, cache: int, rounds: int, threads: int, ways: list[str]) -> list[Row]:
    """Cost of a token once the window is full, and as a ratio to a text of fixed length in a cache of the same size.

    A step of each in turn, so that what else the machine does meets all alike; medians of steps, and of what it takes
    to make room, which a token pays its share of.
    """
    with llmc.load(artifact, cache_tokens=(len(ways) + 2) * cache, threads=threads, drafts=0) as model:
        runner, ids = model.runner, novel_ids(model, 2 * cache + rounds)
        size = cache - spare_slots("sinks", 4, turned=True)
        windows = {way: window_of(Options(**WAYS[way], window=size), runner) for way in ways}
        sequences = {way: runner.new_sequence() for way in [*ways, FIXED]}
        for way, sequence in sequences.items():
            runner.prefill([(sequence, ids[: cache if way == FIXED else size])])
        steps: dict[str, list[float]] = {way: [] for way in sequences}
        rooms: dict[str, list[float]] = {way: [] for way in sequences}
        for at in range(size, size + rounds):
            for way, sequence in sequences.items():
                start = time.perf_counter()
                if way == FIXED:
                    if sequence.length == cache:
                        runner.pool.truncate(sequence, cache - PAGE_TOKENS)
                elif not windows[way].rows(sequence):
                    again = windows[way].make_room(runner, sequence, lambda at=at: ids[:at])
                    if again:
                        runner.prefill([(sequence, again)])
                    rooms[way].append(time.perf_counter() - start)
                start = time.perf_counter()
                runner.step([(sequence, ids[at : at + 1])])
                steps[way].append(time.perf_counter() - start)
        step = {way: statistics.median(seconds) for way, seconds in steps.items()}
        rows = []
        for way in sequences:
            room = statistics.median(rooms[way]) / windows[way].discard if rooms[way] else 0.0
            row = {"": way, "step_ms": 1000 * step[way], "room_ms_per_token": 1000 * room}
            rows.append({**row, "ratio": (step[way] + room) / step[FIXED]})
        return rows


def drifts(given: Path | None, counts: list[int]) -> list[Row]:
    """`drift` of the given artifact, or of one with each kind of pages."""
    if given is not None:
        return drift(given, counts)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            path = Path(folder) / f"{kind}.llmc"
            compile_model(fetch_smollm2.fetch(), path, quant="q4", kv=kind)
            rows += drift(path, counts)
    return rows


def drift(artifact: Path, counts: list[int]) -> list[Row]:
    """Root mean square error of keys, relative to theirs, after each count of shifts by one."""
    with llmc.load(artifact, cache_tokens=3 * DRIFTING, drafts=0) as model:
        runner, kind = model.runner, model.manifest["kv"]["dtype"]
        shifted, exact = runner.new_sequence(), runner.new_sequence()
        for sequence in (shifted, exact):
            runner.prefill([(sequence, novel_ids(model, DRIFTING))])
        pages, first, rows, done = shifted.pages, list(exact.pages), [], 0
        back = np.full(len(pages) * PAGE_TOKENS, -1, np.int32)

        def keys(ids: Any) -> NDArray[np.float32]:
            size = model.manifest["kv"]["head_dim"]
            return np.stack([KINDS[kind].load(layer[list(ids)], size)[0] for layer in runner.pool.layers])

        target = runner.new_sequence()
        runner.pool.reserve_all([(target, DRIFTING)])
        for count in counts:
            for _ in range(count - done):
                runner.turn(back, pages, pages)
            done = count
            runner.turn(count * back, first, target.pages)
            wanted, got = keys(target.pages), keys(pages)
            error = float(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))
            rows.append({"": f"{kind} pages", "shifts": count, "relative_error": error})
        return rows


def perplexity(nats: NDArray[np.float64]) -> float:
    """e to the mean."""
    return float(np.exp(nats.mean()))


def resident_mb() -> float:
    """Memory of the process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    """Measure what is asked for, print the table."""
    parser = arguments(__doc__, tokens=20000, cache=1024, every=16, rounds=600, threads=1)
    parser.add_argument("what", choices=("text", "speed", "drift"))
    parser.add_argument("--ways", help=f"those to measure, with commas between: {', '.join(WAYS)}")
    options = parser.parse_args()
    usual = [way for way in WAYS if way != "no sinks"] if options.what == "speed" else USUAL
    ways = options.ways.split(",") if options.ways else usual
    given = options.artifact
    if options.what == "drift":
        rows = drifts(given, [1, 512, 2048])
    elif options.what == "speed":
        rows = with_artifact(given, lambda path: speed(path, options.cache, options.rounds, options.threads, ways))
    else:
        rows = with_artifact(given, lambda path: text(path, options.tokens, options.cache, options.every, ways))
    show(f"Text without end: {options.what}", rows, options.json)


if __name__ == "__main__":
    main()
