"""What each kind of KV pages costs and gives: KL divergence to float32 pages, bytes of a token, decode speed.

    python tests/bench/kv_quality.py

SmolLM2-135M-Instruct with q4 weights in every row. Text: the ten prompts of tests/end_to_end/prompts.py, each with the
model's own 64 greedy tokens. Int8 activations make chaos of any change, however small: bf16 shows how much of the
divergence that is. Speed: decode steps at a context of 2,000 tokens; rounds are interleaved, the median is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "end_to_end")]

import fetch_smollm2
from prompts import PROMPTS
from quality import all_logits, kl_divergence, log_softmax
from rich.console import Console
from rich.table import Table

import llmc
from llmc.bench_case import fixed_prompt
from llmc.compiler.driver import compile_model
from llmc.runtime.manifest import read_manifest

KINDS = ("f32", "bf16", "q8", "q4")
CONTEXT, STEPS = 2000, 48


def decode_rate(artifact: Path, threads: int) -> float:
    """Tokens per second of single steps after CONTEXT tokens."""
    with llmc.load(artifact, threads=threads, cache_tokens=CONTEXT + STEPS + 16) as model:
        sequence = model.engine.new_sequence()
        model.engine.prefill([(sequence, fixed_prompt(0, CONTEXT, model.manifest["vocab"]))])
        start = time.perf_counter()
        for token in range(STEPS):
            model.engine.step([(sequence, [token])])
        return STEPS / (time.perf_counter() - start)


def divergence(artifacts: dict[str, Path]) -> dict[str, dict[str, float]]:
    """KL to the f32 pages' distributions at every place of the texts, by kind."""
    with llmc.load(artifacts["f32"]) as model:
        results = [model.generate(prompt, max_tokens=64, ignore_eos=True) for prompt in PROMPTS]
    texts = [[*result.prompt_ids, *result.ids] for result in results]
    expected = log_softmax(all_logits(artifacts["f32"], texts))
    rows = {}
    for kind, artifact in artifacts.items():
        got = log_softmax(all_logits(artifact, texts))
        kl = kl_divergence(expected, got)
        rows[kind] = {
            "tokens": len(kl), "kl": float(kl.mean()), "kl_median": float(np.median(kl)),
            "kl_99_percent": float(np.quantile(kl, 0.99)), "kl_max": float(kl.max()),
            "top1_agreement": float((got.argmax(-1) == expected.argmax(-1)).mean()),
        }  # fmt: skip
    return rows


def measure(folder: Path, rounds: int, threads: list[int]) -> list[dict[str, Any]]:
    """A row for each kind."""
    source = fetch_smollm2.fetch()
    artifacts = {kind: folder / f"{kind}.llmc" for kind in KINDS}
    for kind, artifact in artifacts.items():
        if not artifact.exists():
            compile_model(source, artifact, quant="q4", kv=kind)
    found = divergence(artifacts)
    rates: dict[tuple[str, int], list[float]] = {(kind, count): [] for kind in KINDS for count in threads}
    for _ in range(rounds):
        for (kind, count), rate in rates.items():
            rate.append(decode_rate(artifacts[kind], count))
    return [
        {
            "kv": kind,
            "bytes_per_token": read_manifest(artifact).kv.token_bytes,
            **found[kind],
            "decode_tokens_per_s": {count: statistics.median(rates[kind, count]) for count in threads},
            "decode_runs": {count: rates[kind, count] for count in threads},
        }
        for kind, artifact in artifacts.items()
    ]


def main() -> None:
    """Compile each kind, compare, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--artifacts", type=Path, help="folder with f32.llmc, bf16.llmc...; what is missing is compiled")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    threads = [int(count) for count in options.threads.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.artifacts or Path(folder), options.rounds, threads)
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
