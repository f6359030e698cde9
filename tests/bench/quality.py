"""What each weight format does to SmolLM2's logits: KL divergence to float32 and agreement of the first choice.

    python tests/bench/quality.py

Text: the ten prompts of tests/end_to_end/test_exactness.py, each with the float32 model's own 64 greedy tokens.
The source is a Q4_1 file (head Q8_0): the q4 body loses nothing here beyond its int8 activations, so q4 looks
better than it would from float weights.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "end_to_end")]

import fetch_smollm2
from prompts import PROMPTS
from rich.console import Console
from rich.table import Table

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.engine import Feed

FORMATS = [("f32", "f32"), ("bf16", "bf16"), ("q8", "bf16"), ("q4", "bf16")]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(n, V) float32 -> float64 log probabilities."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def all_logits(artifact: Path, texts: list[list[int]]) -> np.ndarray:
    """(all tokens, V) logits of every place of every text."""
    rows = []
    with llmc.load(artifact) as model:
        for ids in texts:
            sequence = model.engine.new_sequence()
            rows.append(model.engine.step([Feed(sequence, ids, "all")]).logits.copy())
            model.engine.release(sequence)
    return np.concatenate(rows)


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n,) KL(reference || other) in nats, from log probabilities."""
    return (np.exp(reference) * (reference - other)).sum(-1)


def main() -> None:
    """Compile each format, compare, print the table."""
    source = fetch_smollm2.fetch()
    table = Table(title="SmolLM2-135M-Instruct, against float32")
    for head in ("weights", "kv", "bits per weight", "KL mean", "KL 99 %", "KL max", "same first choice"):
        table.add_column(head, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        texts: list[list[int]] = []
        expected = np.empty(0)
        for quant, kv in FORMATS:
            made = compile_model(source, Path(folder) / f"{quant}.llmc", quant=quant, kv=kv)
            if not texts:
                with llmc.load(made.path) as model:
                    results = [model.generate(p, max_tokens=64, ignore_eos=True) for p in PROMPTS]
                texts = [[*result.prompt_ids, *result.ids] for result in results]
                expected = log_softmax(all_logits(made.path, texts))
            got = log_softmax(all_logits(made.path, texts))
            kl = kl_divergence(expected, got)
            same = (got.argmax(-1) == expected.argmax(-1)).mean()
            table.add_row(
                quant, kv, f"{made.bits_per_weight:.2f}", f"{kl.mean():.5f}", f"{np.quantile(kl, 0.99):.4f}",
                f"{kl.max():.4f}", f"{same:.1%}",
            )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(f"{len(expected)} tokens")


if __name__ == "__main__":
    main()
