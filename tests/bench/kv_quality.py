"""What each kind of KV pages costs and gives: KL divergence to float32 pages, bytes of a token, decode speed.

    python tests/bench/kv_quality.py

SmolLM2-135M-Instruct with q4 weights in every row. Text: the first windows of 512 tokens of "Persuasion" (texts.py).
Int8 activations make chaos of any change, however small: bf16 shows how much of the divergence that is. Speed: decode
steps at a context of 2,000 tokens, one step of each kind in turn, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import fetch_smollm2
from rich.console import Console
from rich.table import Table
from texts import EVALUATION, austen

import llmc
from llmc.bench_case import fixed_prompt
from llmc.compiler.driver import compile_model
from llmc.runtime.loading.manifest import read_manifest

KINDS = ("f32", "bf16", "q8", "q4")
CONTEXT = 2000
FIGURES = ("kl", "kl_standard_error", "kl_median", "kl_99_percent", "kl_max", "top1_agreement", "tokens")


def decode_rates(artifacts: dict[str, Path], threads: int, steps: int) -> dict[str, float]:
    """Tokens per second of single steps after CONTEXT tokens: of the median step of each kind."""
    with ExitStack() as stack:
        models, sequences, seconds = {}, {}, {kind: [0.0] * steps for kind in artifacts}
        for kind, artifact in artifacts.items():
            model = stack.enter_context(
                llmc.load(artifact, threads=threads, cache_tokens=CONTEXT + steps + 16, drafts=0)
            )
            models[kind], sequences[kind] = model, model.runner.new_sequence()
            prompt = fixed_prompt(0, CONTEXT, model.manifest["vocab"])
            model.runner.prefill([(sequences[kind], prompt)])
        for step in range(steps):
            for kind, model in models.items():
                start = time.perf_counter()
                model.runner.step([(sequences[kind], [step])])
                seconds[kind][step] = time.perf_counter() - start
    return {kind: 1 / statistics.median(times) for kind, times in seconds.items()}


def divergence(artifacts: dict[str, Path], windows: int) -> dict[str, dict[str, float]]:
    """Figures of `Model.evaluate` against f32 pages, by kind."""
    text, found = austen(EVALUATION), {}
    with llmc.load(artifacts["f32"]) as reference:
        for kind, artifact in artifacts.items():
            with llmc.load(artifact) as model:
                figures = model.evaluate(text, against=reference, most_windows=windows).figures()
            found[kind] = {name: figures[name] for name in FIGURES}
    return found


def measure(folder: Path, windows: int, steps: int, threads: list[int]) -> list[dict[str, Any]]:
    """A row for each kind."""
    artifacts = {kind: folder / f"{kind}.llmc" for kind in KINDS}
    for kind, artifact in artifacts.items():
        if not artifact.exists():
            compile_model(fetch_smollm2.fetch(), artifact, quant="q4", kv=kind)
    found = divergence(artifacts, windows)
    rates = {count: decode_rates(artifacts, count, steps) for count in threads}
    return [
        {
            "kv": kind,
            "bytes_per_token": read_manifest(artifact).kv.token_bytes,
            **found[kind],
            "decode_tokens_per_s": {count: rates[count][kind] for count in threads},
        }
        for kind, artifact in artifacts.items()
    ]


def main() -> None:
    """Compile each kind, compare, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="decode steps timed")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--artifacts", type=Path, help="folder of f32.llmc, bf16.llmc...; what is missing is made")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    threads = [int(count) for count in options.threads.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.artifacts or Path(folder), options.windows, options.steps, threads)
    if options.json:
        print(json.dumps(rows))
        return
    table = Table(title=f"SmolLM2-135M-Instruct, q4 weights, against f32 pages over {rows[0]['tokens']} tokens")
    heads = ["kv", "bytes a token", "KL mean", "KL median", "KL 99 %", "KL max", "same first choice"]
    for head in [*heads, *(f"decode tok/s at {CONTEXT}, {count} threads" for count in threads)]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row["kv"], f"{row['bytes_per_token']:,}", f"{row['kl']:.5f}", f"{row['kl_median']:.5f}",
            f"{row['kl_99_percent']:.4f}", f"{row['kl_max']:.4f}", f"{row['top1_agreement']:.1%}",
            *(f"{rate:.1f}" for rate in row["decode_tokens_per_s"].values()),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
