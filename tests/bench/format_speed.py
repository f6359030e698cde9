"""Decode and prefill speed of weight formats on the TinyLlama-1.1B shape, interleaved, beside the read limit.

    python tests/bench/format_speed.py --formats q8,q4,q3h,c4,c3h --rounds 5

All artifacts are loaded at once; every round runs each of them once, in turn. Medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import fetch_smollm2
from models import TINYLLAMA, VOCAB, random_gguf
from rich.console import Console
from rich.table import Table

import llmc
from llmc.bench_case import fixed_prompt
from llmc.cli_bench import weight_bytes_per_step
from llmc.compiler.driver import compile_model
from llmc.read_speed import read_bytes_per_s

WORK = ROOT / "build" / "bench"


def main() -> None:
    """Compile what is missing, run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="q8,q6,q5,q4,q4_b64,q3h,q3,q2,c6,c5,c4,c3h,c3,c2h,c2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    console = Console(stderr=True)
    source = random_gguf(WORK, TINYLLAMA, "q8", Path(fetch_smollm2.fetch()))
    artifacts = {}
    for name in options.formats.split(","):
        artifacts[name] = WORK / f"1.1B-{name}.llmc"
        if not artifacts[name].exists():
            console.print(f"compiling {name}")
            compile_model(source, artifacts[name], quant=name)
    models = {name: llmc.load(path, threads=options.threads, drafts=0) for name, path in artifacts.items()}
    prompt = fixed_prompt(0, options.prompt_tokens, VOCAB)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    reads = [read_bytes_per_s(options.threads)]
    for number in range(options.rounds + 1):
        for name, model in models.items():
            result = model.generate(prompt, max_tokens=options.new_tokens, ignore_eos=True)
            timings = result.timings
            rate = (len(prompt) / timings["prefill_s"], timings["decode_tokens"] / timings["decode_s"])
            if number:  # the first round touches the pages
                rates[name].append(rate)
        reads.append(read_bytes_per_s(options.threads))
    rows = [_row(name, artifacts[name], rates[name], max(reads)) for name in models]
    table = Table(title=f"1.1B shape, {options.threads} threads, read limit {max(reads) / 1e9:.1f} GB/s")
    for head in ("format", "MB/token", "decode tok/s", "GB/s", "of limit", "prefill tok/s"):
        table.add_column(head, justify="left" if head == "format" else "right")
    for row in rows:
        table.add_row(
            row["name"], f"{row['bytes'] / 1e6:.0f}", f"{row['decode']:.1f}", f"{row['bytes_per_s'] / 1e9:.1f}",
            f"{row['of_limit']:.0%}", f"{row['prefill']:.0f}",
        )  # fmt: skip
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _row(name: str, artifact: Path, rates: list[tuple[float, float]], read: float) -> dict[str, Any]:
    size = weight_bytes_per_step(artifact, json.loads((artifact / "manifest.json").read_text()))
    prefill, decode = (statistics.median(values) for values in zip(*rates, strict=True))
    return {
        "name": name, "bytes": size, "prefill": prefill, "decode": decode, "bytes_per_s": decode * size,
        "of_limit": decode * size / read,
    }  # fmt: skip


if __name__ == "__main__":
    main()
