"""Draw what tests/bench/quality.py measured: divergence over bits per weight, ours and llama.cpp's, and tables.

python tests/bench/quality.py --draw docs/quality        reads MODEL.json there, writes MODEL.svg and MODEL.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

NAMES = {
    "smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma3-270M",
    "smollm2-dithered": "SmolLM2-135M, weights moved off their grid",
    "gemma3-dithered": "Gemma3-270M, weights moved off their grid",
}  # fmt: skip
# kind -> which rows, how they look
GROUPS = {
    "codebooks (ours)": (lambda r: not r.get("peer") and r["name"][0] == "c", "o", "#1f77b4"),
    "rotated (ours)": (lambda r: not r.get("peer") and r["name"][0] == "r", "v", "#8c4fb8"),
    "mixed to a budget (ours)": (lambda r: r["name"].startswith("mixed"), "D", "#17a06b"),
    "even steps (the lead seed's)": (lambda r: not r.get("peer") and r["name"][0] == "q", "s", "#999999"),
    "llama.cpp": (lambda r: bool(r.get("peer")), "^", "#d62728"),
}


def draw(folder: Path) -> None:
    """One plot and one table for each model in the folder."""
    for path in sorted(folder.glob("*.json")):
        found = [row for row in json.loads(path.read_text()) if row["name"].lower() not in ("f32", "bf16")]
        _plot(found, NAMES.get(path.stem, path.stem), path.with_suffix(".svg"))
        path.with_suffix(".md").write_text(_table(json.loads(path.read_text())), encoding="utf-8")


def _plot(found: list[dict[str, Any]], title: str, path: Path) -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "llmc", "font.size": 10})
    figure, axes = plt.subplots(figsize=(9, 6))
    for group, (belongs, marker, colour) in GROUPS.items():
        for calibrated in (False, True):
            own = [r for r in found if belongs(r) and r["calibrated"] == calibrated and r["kl"] > 0]
            if not own:
                continue
            own.sort(key=lambda r: r["bits_per_weight"])
            axes.plot(
                [r["bits_per_weight"] for r in own], [r["kl"] for r in own], marker=marker, color=colour,
                linestyle="-" if calibrated else "none" if "even" in group else ":",
                markerfacecolor=colour if calibrated else "none", linewidth=1, alpha=0.9,
                label=group + (", calibrated" if calibrated else ""),
            )  # fmt: skip
            for row in own:
                name = row["name"].removeprefix("mixed ")
                axes.annotate(name, (row["bits_per_weight"], row["kl"]), fontsize=7, xytext=(3, 3),
                              textcoords="offset points", color=colour)  # fmt: skip
    axes.set(yscale="log", xlabel="bits per weight, of all stored bytes", ylabel="KL divergence to float32, nats",
             title=f"{title}: what a format loses")  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| format | bits per weight | MB | perplexity | KL to float32 | same first choice | decode tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(found, key=lambda row: (-row["bits_per_weight"], row["kl"])):
        name = ("llama.cpp " if row.get("peer") else "") + row["name"]
        lines.append(
            f"| {name}{' + calibration' if row['calibrated'] else ''} | {row['bits_per_weight']:.2f} | "
            f"{row['bytes'] / 1e6:.1f} | {row['perplexity']:.2f} | {row['kl']:.4f} | {row['top1_agreement']:.1%} | "
            f"{row.get('decode_tokens_per_s') or 0:.0f} |".replace(" 0 |", " |")
        )
    return "\n".join(lines) + "\n"
