"""Times of models on a GPU, beside what its memory and its tensor cores can do at most, measured in the same run.

    python tests/gpu/time_models.py PACK [--json FILE]

Of every artifact in PACK/shapes: a prompt of 2,048 tokens, and decode of 1, 8 and 32 sequences behind prompts of 128.
Bytes of a step: the weights that it reads, once, and the pages of its sequences. Where PyTorch is there, it says what
bfloat16 products reach (8,192 x 8,192 x 8,192).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import shapes
from torch_here import torch_here

from llmc.runtime import load
from llmc.runtime.cache.pages import Sequence
from llmc.runtime.cuda.cudart import ON_DEVICE
from llmc.runtime.cuda.device import the_device
from llmc.runtime.runner import Feed, Runner

PROMPT, STEPS, REPEATS = 2048, 64, 5
BATCHES = (1, 8, 32)
COPY_BYTES = 1 << 30
Row = dict[str, Any]


class Stopwatch:
    """Milliseconds between two points of the device's stream, by CUDA's events."""

    def __init__(self) -> None:
        self.device = the_device()
        self.library = ctypes.CDLL("libcudart.so.13")
        self.events = [ctypes.c_void_p() for _ in range(2)]
        for event in self.events:
            self.library.cudaEventCreate(ctypes.byref(event))

    def of(self, work: Any) -> float:
        stream = ctypes.c_void_p(self.device.stream)
        self.library.cudaEventRecord(self.events[0], stream)
        work()
        self.library.cudaEventRecord(self.events[1], stream)
        self.library.cudaEventSynchronize(self.events[1])
        took = ctypes.c_float()
        self.library.cudaEventElapsedTime(ctypes.byref(took), *self.events)
        return took.value


def bandwidth(nbytes: int) -> float:
    """GB/s, read and written, of copies on the device."""
    device, watch = the_device(), Stopwatch()
    one, other = (device.tensor((nbytes,), np.dtype(np.uint8), "the copies") for _ in range(2))

    def copy() -> None:
        device.cudart.copy(one.data_ptr(), other.data_ptr(), nbytes, ON_DEVICE, device.stream)

    copy()
    return 2 * nbytes / 1e6 / max(1e-9, statistics.median(watch.of(copy) for _ in range(REPEATS)))


def bf16_rate() -> float | None:
    """Tflop/s of PyTorch's bfloat16 products; None without PyTorch or a device that it can use."""
    torch = torch_here()
    if torch is None:
        return None
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2 * size**3 / 1e9 / statistics.median(times[2:])


def times_of(artifact: Path, prompt: int, steps: int, batches: tuple[int, ...]) -> list[Row]:
    """Rows of one artifact; medians."""
    start = time.perf_counter()
    rows: list[Row] = []
    longest = max(prompt, max(batches) * (128 + steps + 16)) + 64
    with load(artifact, cache_tokens=2 * longest) as model:
        loaded = time.perf_counter() - start
        runner, manifest = model.runner, model.manifest
        weights = _step_bytes(artifact / manifest["weights"]["file"])
        ids = np.arange(prompt) % manifest["vocab"]

        def read() -> float:
            sequence = runner.new_sequence()
            begin = time.perf_counter()
            runner.prefill([(sequence, ids)])
            took = time.perf_counter() - begin
            runner.release(sequence)
            return took

        read()
        seconds = statistics.median(read() for _ in range(REPEATS))
        rate = shapes.prefill_flops(shapes.SEVEN_BILLION, prompt) / 1e12 / seconds
        rows.append(
            {"case": f"prefill {prompt}", "tokens_per_s": prompt / seconds, "load_s": loaded, "tflops": rate}
        )  # fmt: skip
        for batch in batches:
            sequences = [runner.new_sequence() for _ in range(batch)]
            runner.prefill([(sequence, ids[:128]) for sequence in sequences])
            took = decode(runner, sequences, steps)
            for sequence in sequences:
                runner.release(sequence)
            seconds = statistics.median(took[len(took) // 4 :])
            read_bytes = weights + batch * (128 + steps // 2) * _token_bytes(manifest)
            rows.append(
                {"case": f"decode {batch}", "tokens_per_s": batch / seconds, "ms": 1e3 * seconds,
                 "gb_per_s": read_bytes / 1e9 / seconds}
            )  # fmt: skip
    return [{"model": artifact.name.removesuffix(".llmc"), **row} for row in rows]


def decode(runner: Runner, sequences: list[Sequence], steps: int) -> list[float]:
    """Seconds from one step's end to the next's, of greedy answers: a step follows the one before where it can."""
    begun, took = runner.begin([Feed(sequence, [5]) for sequence in sequences]), list[float]()
    before = time.perf_counter()
    for _ in range(steps):
        ahead = runner.follow(begun)
        tokens = begun.wait().argmax.tolist()
        del begun  # who holds logits has them read before the next step is launched
        begun = ahead or runner.begin([Feed(each, [token]) for each, token in zip(sequences, tokens, strict=True)])
        now = time.perf_counter()
        took.append(now - before)
        before = now
    begun.wait()
    return took


def _step_bytes(weights: Path) -> int:
    """Of all tensors that a step reads: of a table of embeddings beside a head it reads a row a token."""
    with weights.open("rb") as file:
        table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    looked_up = {"embedding"} if "head" in table else set()
    sizes = {name: each["data_offsets"] for name, each in table.items() if name not in {"__metadata__", *looked_up}}
    return sum(end - begin for begin, end in sizes.values())


def _token_bytes(manifest: dict[str, Any]) -> float:
    kv = manifest["kv"]
    return kv["layers"] * float(np.prod(kv["page_shape"])) / 16 * {"f32": 4, "bf16": 2}.get(kv["dtype"], 1)


def share(row: Row, copied: float, rate: float | None) -> str:
    """How much a row has of what the device can: decode of its bandwidth, prefill of its products."""
    if "gb_per_s" in row:
        return f"{row['gb_per_s']:7.0f} GB/s, {row['gb_per_s'] / copied:4.0%} of copies"
    return f"{row['tflops']:7.1f} Tflop/s" + ("" if rate is None else f", {row['tflops'] / rate:4.0%} of products")


def main() -> int:
    """Time all shapes, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--json", type=Path, help="write what was found to this file too")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--copy-bytes", type=int, default=COPY_BYTES)
    options = parser.parse_args()
    batches = tuple(map(int, options.batches.split(",")))
    artifacts = sorted((options.pack / "shapes").glob("*.llmc"))
    for artifact in artifacts:
        if (artifact / shapes.HEADER).exists():
            shapes.grow(artifact)
    with load(artifacts[0], cache_tokens=64):  # with TVM's runtime, which gives memory of the device
        copied = bandwidth(options.copy_bytes)
    rate, rows = bf16_rate(), list[Row]()
    print(f"copies {copied:.0f} GB/s, bfloat16 products {'not measured' if rate is None else f'{rate:.0f} Tflop/s'}")
    for artifact in artifacts:
        for row in times_of(artifact, options.prompt, options.steps, batches):
            rows.append(row)
            speed = f"{row['tokens_per_s']:10.1f} tokens/s  {share(row, copied, rate)}"
            print(f"{row['model']:16} {row['case']:14} {speed}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"copies_gb_per_s": copied, "bf16_tflops": rate, "rows": rows}, indent=1))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
