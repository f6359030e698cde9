"""Our formats and llama.cpp's on the same matrices, at their own bits, with and without calibration.

    LLMC_PEER_LIB=.../libggml-base.so python tests/bench/matrix_formats.py MODEL.gguf --matrix down

One kind of matrix of every layer is rounded, all else stays float32, activations too: what the divergence shows is the
format alone. llama.cpp's importance is the mean square of each column's inputs, from the same text as our calibration.
Only matrices whose rows are multiples of 256 can be stored in its K formats.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import texts
from peer_formats import quantize_matrix
from rich.console import Console
from rich.progress import track
from rich.table import Table

from llmc.compiler.driver.calibrate import calibrate
from llmc.compiler.driver.check import compare
from llmc.compiler.driver.probe import Probe
from llmc.compiler.driver.texts import calibration_windows
from llmc.compiler.formats import FORMATS, block_format, dequantize
from llmc.frontends.source import open_model
from llmc.passes.quantize.gptq import compensate

OURS = ("c2", "c2h", "c3", "c3h", "c4", "c5", "c6")
PEER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

Round = Callable[[np.ndarray, np.ndarray], np.ndarray]  # weight (N, K), second moments (K, K) -> rounded weight


def our_rounding(name: str, calibrated: bool) -> Round:
    """A format of ours; calibrated: with compensation."""
    format = block_format(name)

    def rounded(weight: np.ndarray, gram: np.ndarray) -> np.ndarray:
        found = compensate(weight, format, gram) if calibrated else format.quantize(weight)
        return dequantize(format, found)[:, : weight.shape[1]]

    return rounded


def peer_rounding(kind: str, calibrated: bool) -> Round:
    """A format of llama.cpp's, by its own quantizer."""

    def rounded(weight: np.ndarray, gram: np.ndarray) -> np.ndarray:
        raw = quantize_matrix(weight, kind, np.ascontiguousarray(gram.diagonal()) if calibrated else None)
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])

    return rounded


def cases() -> list[dict[str, Any]]:
    """Every format on both sides, with and without calibration."""
    found: list[dict[str, Any]] = []
    for calibrated in (False, True):
        for name in OURS:
            bits = 8 * 4 * np.prod(FORMATS[name].packed_shape(1024, 4096)) / (1024 * 4096)
            found.append({"name": name, "bits": float(bits), "peer": False, "round": our_rounding(name, calibrated)})
            found[-1]["calibrated"] = calibrated
        for kind in PEER:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            found.append(
                {"name": kind, "bits": 8 * size / block, "peer": True, "round": peer_rounding(kind, calibrated)}
            )
            found[-1]["calibrated"] = calibrated
    return found


def measure(source: Path, part: str, count: int) -> list[dict[str, Any]]:
    """Mean divergence of each case over `count` windows of the evaluation text."""
    with open_model(source) as model:
        probe = Probe(model)
        learn, test = texts.split()
        grams = calibrate(probe, calibration_windows(model, learn, 0), lambda done, total: None)
        windows = calibration_windows(model, test, 1)[:count]
        expected = [probe.run(ids)[0] for ids in windows]
        chosen = [m for m in probe.matrices if m.sources[0].endswith(f".{part}")]
        weights = [np.concatenate([model.tensors[n].read() for n in m.sources]) for m in chosen]
        found = cases()
        for case in track(found, "formats", console=Console(stderr=True)):
            rounding = case.pop("round")
            error = total = 0.0
            with ExitStack() as stack:
                for matrix, weight in zip(chosen, weights, strict=True):
                    gram = grams[matrix.sources[0]]
                    rounded = rounding(weight, gram)
                    difference = rounded - weight
                    error += float(np.einsum("nk,kl,nl->", difference, gram, difference, optimize=True))
                    total += float(np.einsum("nk,kl,nl->", weight, gram, weight, optimize=True))
                    stack.enter_context(probe.replaced(matrix, rounded))
                kl = [compare(e, probe.run(ids)[0])[0] for e, ids in zip(expected, windows, strict=True)]
            case["kl"] = float(np.concatenate(kl).mean())
            case["output_error"] = (error / total) ** 0.5
    return found


def at_bits(rows: list[dict[str, Any]], bits: float) -> float:
    """KL at a size between two of the rows: straight in log KL over bits."""
    rows = sorted(rows, key=lambda row: row["bits"])
    sizes, logs = [row["bits"] for row in rows], [np.log(row["kl"]) for row in rows]
    return float(np.exp(np.interp(bits, sizes, logs)))


def main() -> None:
    """Measure, print both tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--matrix", default="down")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = measure(options.model, options.matrix, options.windows)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    table = Table(title=f"{options.model.stem}: {options.matrix} matrices rounded, all else float32")
    for head in ("format", "calibrated", "bits/weight", "output error", "KL"):
        table.add_column(head, justify="right")
    for row in sorted(found, key=lambda row: (row["calibrated"], row["bits"])):
        table.add_row(("llama.cpp " if row["peer"] else "") + row["name"], "yes" if row["calibrated"] else "",
                      f"{row['bits']:.2f}", f"{row['output_error']:.4f}", f"{row['kl']:.5f}")  # fmt: skip
    console = Console(width=110)
    console.print(table)
    ratio = Table(title="KL at llama.cpp's bits, ours over its")
    for head in ("bits", "without calibration", "with"):
        ratio.add_column(head, justify="right")
    for kind in PEER:
        cells = []
        for calibrated in (False, True):
            (its,) = [r for r in found if r["name"] == kind and r["calibrated"] == calibrated]
            own = [r for r in found if not r["peer"] and r["calibrated"] == calibrated]
            cells.append(f"{at_bits(own, its['bits']) / its['kl']:.2f}")
        ratio.add_row(f"{its['bits']:.2f}", *cells)
    console.print(ratio)


if __name__ == "__main__":
    main()
