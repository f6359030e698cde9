"""Where the time of a step goes on a GPU: what each kernel takes, by PyTorch's profiler, which asks CUPTI.

    python tests/gpu/profile_models.py PACK [--only NAME,NAME] [--top N] [--json FILE]

Of every artifact in PACK/shapes: a prompt of 2,048 tokens, a step of one sequence and of 32 behind prompts of 128.
Kernels of one name and one size of blocks are a row. `busy` is what all of them take, `step` the time of a step that
nobody looks at: the difference is gaps between kernels, and the host. Without PyTorch it says so and is content.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import shapes
from torch_here import torch_here

from llmc.runtime import load
from llmc.runtime.cuda.device import the_device
from llmc.runtime.runner import Feed

PROMPT, TOP, REPEATS = 2048, 12, 5
Row = dict[str, Any]


def kernels_of(work: Callable[[], Any]) -> list[Row]:
    """What ran on the device while `work` did, most time first: name, how many times, milliseconds of all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        the_device().wait()
    found = [
        {"name": each.key, "count": each.count, "ms": each.self_device_time_total / 1e3}
        for each in profiler.key_averages()
    ]  # fmt: skip
    return sorted(found, key=lambda row: -row["ms"])


def steps_of(artifact: Path, prompt: int) -> list[Row]:
    """Each step's time, and its kernels."""
    rows = []
    with load(artifact, cache_tokens=2 * prompt + 32 * 256) as model:
        runner = model.runner
        ids = np.arange(prompt) % model.manifest["vocab"]

        def read() -> None:
            sequence = runner.new_sequence()
            runner.prefill([(sequence, ids)])
            runner.release(sequence)

        rows.append({"case": f"prefill {prompt}", **_looked_at(read)})
        for batch in (1, 32):
            sequences = [runner.new_sequence() for _ in range(batch)]
            runner.prefill([(sequence, ids[:128]) for sequence in sequences])
            row = _looked_at(lambda sequences=sequences: runner.step([Feed(each, [5]) for each in sequences]))  # type: ignore[misc]
            rows.append({"case": f"decode {batch}", **row})
            for sequence in sequences:
                runner.release(sequence)
    return [{"model": artifact.name.removesuffix(".llmc"), **row} for row in rows]


def _looked_at(work: Callable[[], Any]) -> Row:
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    kernels = kernels_of(work)
    return {
        "step_ms": 1e3 * statistics.median(seconds), "busy_ms": sum(row["ms"] for row in kernels), "kernels": kernels,
    }  # fmt: skip


def main() -> int:
    """Look at all shapes, print the kernels that take most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--json", type=Path, help="write all kernels to this file")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--only", default="", help="these shapes, by name")
    parser.add_argument("--top", type=int, default=TOP, help="kernels that are shown")
    options = parser.parse_args()
    if torch_here() is None:
        print("no PyTorch that sees the GPU: no kernels are timed")
        return 0
    rows: list[Row] = []
    for artifact in sorted((options.pack / "shapes").glob("*.llmc")):
        if options.only and not any(artifact.name == f"llama-7b-{name}.llmc" for name in options.only.split(",")):
            continue
        if (artifact / shapes.HEADER).exists():
            shapes.grow(artifact)
        for row in steps_of(artifact, options.prompt):
            rows.append(row)
            print(f"{row['model']} {row['case']}: step {row['step_ms']:.2f} ms, busy {row['busy_ms']:.2f} ms")
            for each in row["kernels"][: options.top]:
                one = 1e3 * each["ms"] / each["count"]
                print(f"  {each['ms']:8.3f} ms {each['count']:5} x {one:8.1f} us  {each['name']}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
