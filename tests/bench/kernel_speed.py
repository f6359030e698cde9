"""How fast a linear layer's kernel reads each weight format, by itself, for one row and for several.

    python tests/bench/kernel_speed.py --formats q4,q3h,c4 --rows 1,4,8,16
    python tests/bench/kernel_speed.py --outputs 11264 --columns 2048 --threads 1 --json rows.json

Copies of one matrix stand in more memory than the caches hold and are read in turn; formats are interleaved, medians
over rounds. "cost" is the time of M rows over the time of one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from tvm import tirx

import llmc.targets.target as targets
from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, OFFERED, TILE, BlockFormat, block_format
from llmc.read_speed import read_bytes_per_s
from llmc.targets.build import compile_kernels
from llmc.targets.lower import make_kernel
from llmc.targets.tuned import shipped

MOST_ROWS = 512


def main() -> None:
    """Build the kernels, run the rounds, print the table."""
    offered = ",".join(name for name in OFFERED if isinstance(FORMATS[name], BlockFormat))
    known = ",".join(name for name, format in FORMATS.items() if isinstance(format, BlockFormat))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=offered, help="of: " + known)
    parser.add_argument("--rows", default="1", help="rows of activations, such as 1,4,8,16")
    parser.add_argument("--outputs", type=int, default=11264)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--megabytes", type=int, default=400, help="of copies of each matrix")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)  # read when the first kernel runs
    names, counts = options.formats.split(","), [int(count) for count in options.rows.split(",")]
    cases = {name: Case(name, options.outputs, options.columns, options.megabytes) for name in names}
    seconds: dict[tuple[str, int], list[float]] = {(name, count): [] for name in names for count in counts}
    limits = []
    for _ in range(options.rounds + 1):
        limits.append(read_bytes_per_s(options.threads, 1))
        for (name, count), times in seconds.items():
            times.append(cases[name].seconds(count))
    rows = [
        row(cases[name], count, statistics.median(times[1:]), statistics.median(seconds[name, counts[0]][1:]))
        for (name, count), times in seconds.items()
    ]
    show(rows, statistics.median(limits), f"{options.outputs} x {options.columns}, {options.threads} threads")
    if options.json:
        options.json.write_text(json.dumps({"read_limit": statistics.median(limits), "rows": rows}, indent=1))


def _tile(format: BlockFormat, columns: int) -> np.ndarray:
    """Sixteen rows of random weights, packed; of what only checkpoints have, bytes that make no strange float16."""
    rng = np.random.default_rng(0)
    if format.quantizer is not None:
        return format.pack(rng.standard_normal((TILE, columns)).astype(np.float32))
    words: np.ndarray = rng.integers(0, 2**31, format.packed_shape(TILE, columns)).astype(np.int32) & 0x3F3F3F3F
    return words


class Case:
    """The kernel of a format, and copies of a matrix for it."""

    def __init__(self, name: str, outputs: int, columns: int, megabytes: int) -> None:
        format = block_format(name)
        self.name, self.outputs, self.columns = name, outputs, columns
        one = _tile(format, columns)
        matrix = np.repeat(one, -(-outputs // TILE), axis=0)
        self.bytes = matrix.nbytes
        self.copies = [tvm.runtime.tensor(matrix) for _ in range(max(2, megabytes * 1_000_000 // self.bytes))]
        rows = tirx.Var("m", "int64")
        x = np.random.default_rng(1).standard_normal((MOST_ROWS, columns)).astype(np.float32)
        self.left = meaning.left_of(format, x)
        shapes = [*([rows, part.shape[1]] for part in self.left), list(matrix.shape), [rows, outputs]]
        target = targets.native()
        attrs = {"format": name, "width": outputs}
        knobs = shipped(target).knobs(target.knobs, "i8_linear", shapes, attrs)
        kernel = make_kernel("i8_linear", replace(target, knobs=knobs), shapes, attrs)
        self.kernel = compile_kernels({"kernel": kernel}, target)["kernel"]

    def seconds(self, count: int) -> float:
        """Of one matrix times `count` rows."""
        left = [tvm.runtime.tensor(array[:count]) for array in self.left]
        out = tvm.runtime.tensor(np.empty((count, self.outputs), np.float32))
        start = time.perf_counter()
        for copy in self.copies:
            self.kernel(*left, copy, out)
        return (time.perf_counter() - start) / len(self.copies)


def row(case: Case, count: int, seconds: float, first: float) -> dict[str, Any]:
    """One row of the table."""
    return {
        "format": case.name, "rows": count, "bytes": case.bytes, "us": seconds * 1e6,
        "gb_s": case.bytes / seconds / 1e9, "gops": 2e-9 * count * case.outputs * case.columns / seconds,
        "cost": seconds / first,
    }  # fmt: skip


def show(rows: list[dict[str, Any]], limit: float, title: str) -> None:
    """The rows as a table."""
    table = Table(title=f"{title}, read limit {limit / 1e9:.1f} GB/s")
    for column in ("format", "rows", "MB", "us", "GB/s", "of limit", "Gop/s", "cost"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for r in rows:
        table.add_row(
            r["format"], str(r["rows"]), f"{r['bytes'] / 1e6:.1f}", f"{r['us']:.0f}", f"{r['gb_s']:.1f}",
            f"{r['gb_s'] * 1e9 / limit:.0%}", f"{r['gops']:.0f}", f"{r['cost']:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
