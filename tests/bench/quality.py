"""Every weight format on a real model and a real text: bits per weight, perplexity, divergence, speed.

    python tests/bench/quality.py smollm2 --output docs/quality
    python tests/bench/quality.py gemma3 --peer peer.json --output docs/quality
    python tests/bench/quality.py --draw docs/quality

Text: 512-token windows of "Persuasion", first token of each unscored; calibration on "Emma" (tests/bench/texts.py).
The reference is the same weights in float32. `--peer` adds the rows that tests/bench/peer_formats.py measured with
llama.cpp on the same tokens. Both models' weights were quantized by their publishers already: near those sizes every
requantization is measured from a grid, and a format that holds that grid (SmolLM2: q4) shows no loss at all.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import fetch_gemma3
import fetch_smollm2
import texts
from peer_formats import write_float32
from rich.console import Console
from rich.progress import track
from rich.table import Table

import llmc
import llmc.targets.target as targets
from llmc.compiler.driver.budget import choose_formats, weigh_formats
from llmc.compiler.driver.calibrate import calibrate, mean_squares, squares_of
from llmc.compiler.driver.compile import write_artifact
from llmc.compiler.driver.equalize import COMPENSATED, common, factors
from llmc.compiler.driver.plan import Plan, Reading, scaled_groups
from llmc.compiler.driver.probe import Probe
from llmc.compiler.driver.recipe import Recipe, keep, uniform
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.driver.texts import calibration_windows, sample_window, scaling_windows
from llmc.compiler.driver.tuning.found import Found
from llmc.compiler.formats import OFFERED
from llmc.frontends.source import open_model
from llmc.runtime.quality import score_rows, windows
from llmc.runtime.runner import Feed

DITHERED = "-dithered"  # the same weights moved off the grid of their file, see peer_formats.dithered
MODELS = {"smollm2": fetch_smollm2.fetch, "gemma3": fetch_gemma3.fetch}
CALIBRATED = ("c4", "c3h", "c3", "c2h", "c2")
BUDGETS = (2.6, 3.0, 3.5, 4.0, 4.5, 5.5)
WORK = ROOT / "build" / "bench"
ROWS = 128  # logit rows held at once


@dataclass(frozen=True)
class Row:
    """One compile of the model."""

    name: str
    plan: Plan
    kv: str = "bf16"
    calibrated: bool = False


def rows(model: Any, asked: argparse.Namespace) -> Iterator[Row]:
    """Every row of the table that is asked for; the plans share one probe and one calibration."""
    text = calibration_windows(model, texts.split()[0], 0)
    probe = Probe(model)
    calibrated = bool(asked.calibrated or asked.budgets)
    grams = calibrate(probe, text, lambda done, total: None) if calibrated else {}
    seen = common(mean_squares(probe, scaling_windows(model))) if asked.equalize else {}

    def source(recipe: Recipe, taught: bool = False) -> ModelSources:
        """As `llmc compile` has it, with the text or without."""
        request = Request("", Path(), equalize=asked.equalize)
        groups = scaled_groups(request, (targets.native(),), model, recipe) if asked.equalize else []
        squares = squares_of(grams) if taught else seen
        scaled = factors(model, groups, squares, COMPENSATED if taught else 1)
        return ModelSources(model, grams if taught else {}, squares, scaled)

    exact = uniform(model.spec, "f32")
    yield Row("f32", _plan(exact, ModelSources(model)), "f32")
    if set(keep(model).values()) != {"q8"}:
        for name, kv in (("kept", "bf16"), ("kept, kv q8", "q8"), ("kept, kv q4", "q4")):
            yield Row(name, _plan(keep(model), source(keep(model))), kv)
    for taught, names in ((False, asked.formats), (True, asked.calibrated)):
        for name in names:
            recipe = uniform(model.spec, name)
            yield Row(name, _plan(recipe, source(recipe, taught)), calibrated=taught)
    count = sum(math.prod(tensor.shape) for tensor in model.tensors.values())
    for taught in (False, True) if asked.budgets else ():
        any_recipe, trial = source({}, taught), text[:1] if taught else [sample_window(model)]
        choices = weigh_formats(probe, any_recipe, trial, lambda done, total: None)
        for bpw in map(float, asked.budgets):
            budget = replace(Request("", Path()), bpw=bpw).budget(count)
            assert budget is not None
            recipe = choose_formats(probe, model, choices, budget)
            yield Row(f"mixed {bpw:g}", _plan(recipe, any_recipe), calibrated=taught)


def _plan(recipe: Recipe, source: ModelSources) -> Plan:
    return Plan(recipe, lambda report: Reading(source))


def compile_rows(source: Path, folder: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile all of them; name, calibrated, path, bits per weight and bytes of weights of each."""
    target, knobs, made = targets.native(), Found(None), []
    with open_model(source) as model:
        for number, row in enumerate(rows(model, asked)):
            path = folder / f"{number}.llmc"
            request = Request(source, path, kv=row.kv)
            manifest, _ = write_artifact(request, (target,), knobs, model, row.plan, lambda stage, done, total: None)
            about = manifest["quantization"]
            made.append(
                {
                    "name": row.name, "calibrated": row.calibrated, "path": str(path),
                    "bits_per_weight": about["bits_per_weight"], "formats": about["tensors"],
                    "bytes": (path / "weights.safetensors").stat().st_size,
                }
            )  # fmt: skip
            print(f"compiled {row.name} {'calibrated' if row.calibrated else ''}", file=sys.stderr, flush=True)
    return made


def evaluate(made: list[dict[str, Any]], text: str, count: int) -> None:
    """Add perplexity, kl and top1 to each row: all models read each window in turn, beside the first, float32."""
    models = [llmc.load(row["path"]) for row in made]
    first = models[0]
    ids, start = first.encode(text), first.encode("")
    cut = windows(ids[len(start) :], 512, start[0] if start else None)[:count]
    nll: list[list[Any]] = [[] for _ in made]
    kl, same = [list(each) for each in nll], [list(each) for each in nll]
    for window in track(cut, "scoring", console=Console(stderr=True)):
        sequences = [model.runner.new_sequence() for model in models]
        for at in range(0, len(window) - 1, ROWS):
            part = window[at : min(at + ROWS, len(window) - 1)]
            wanted = window[at + 1 : at + 1 + len(part)]
            reference = first.runner.step([Feed(sequences[0], part, "all")])
            for i, (model, sequence) in enumerate(zip(models, sequences, strict=True)):
                output = reference if i == 0 else model.runner.step([Feed(sequence, part, "all")])
                scores, divergence = score_rows([output, reference], wanted)
                nll[i].append(scores[0])
                kl[i].append(divergence)
                same[i].append(output.argmax == reference.argmax)
        for model, sequence in zip(models, sequences, strict=True):
            model.runner.release(sequence)
    for i, row in enumerate(made):
        row["tokens"] = sum(map(len, nll[i]))
        row["perplexity"] = float(np.exp(np.concatenate(nll[i]).mean()))
        row["kl"] = float(np.concatenate(kl[i]).mean())
        row["kl_standard_error"] = float(np.concatenate(kl[i]).std() / row["tokens"] ** 0.5)
        row["top1_agreement"] = float(np.concatenate(same[i]).mean())
        models[i].close()


def measure_speed(row: dict[str, Any]) -> None:
    """Add decode_tokens_per_s with every core."""
    command = [sys.executable, "-m", "llmc", "bench", row["path"], "--prompt-tokens", "16", "--new-tokens", "96",
               "--batch", "1", "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row["decode_tokens_per_s"] = max(case["decode_tokens_per_s"] for case in json.loads(done.stdout))


def peer_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of peer_formats.py in our words."""
    same = {key: row[key] for key in ("name", "bits_per_weight", "bytes", "perplexity", "kl", "tokens", "types")}
    return same | {
        "peer": True, "calibrated": row["imatrix"], "top1_agreement": row["top1"], "decode_tokens_per_s": row["decode"],
    }  # fmt: skip


def model_file(name: str) -> Path:
    """The GGUF file of a model, fetched or made."""
    source = Path(MODELS[name.removesuffix(DITHERED)]())
    if not name.endswith(DITHERED):
        return source
    path = WORK / f"{source.stem}{DITHERED}.gguf"
    if not path.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        write_float32(source, path.with_suffix(".part"), dither=0)
        path.with_suffix(".part").rename(path)
    return path


def table(title: str, found: list[dict[str, Any]]) -> Table:
    """Rows by size, ours and the peer's together."""
    out = Table(title=title)
    for head in ("format", "bits/weight", "MB", "perplexity", "KL", "same first choice", "decode tok/s"):
        out.add_column(head, justify="left" if head == "format" else "right")
    for row in sorted(found, key=lambda row: -row["bits_per_weight"]):
        out.add_row(
            label(row), f"{row['bits_per_weight']:.2f}", f"{row['bytes'] / 1e6:.1f}", f"{row['perplexity']:.3f}",
            f"{row['kl']:.4f}", f"{row['top1_agreement']:.1%}",
            f"{speed:.0f}" if (speed := row.get("decode_tokens_per_s")) else "",
        )  # fmt: skip
    return out


def label(row: dict[str, Any]) -> str:
    """The name in tables and plots."""
    prefix = "llama.cpp " if row.get("peer") else ""
    return f"{prefix}{row['name']}{' + calibration' if row['calibrated'] else ''}"


def main() -> None:
    """Measure one model, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=[*MODELS, *(name + DITHERED for name in MODELS)])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--formats", nargs="*", default=OFFERED[1:])
    parser.add_argument("--calibrated", nargs="*", default=CALIBRATED, help="formats to calibrate")
    parser.add_argument("--budgets", nargs="*", default=BUDGETS, help="bits per weight of mixed recipes")
    parser.add_argument("--equalize", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peer", type=Path, help="rows of tests/bench/peer_formats.py")
    parser.add_argument("--output", type=Path, help="folder for MODEL.json")
    parser.add_argument("--draw", type=Path, help="folder of results: write quality.svg and tables there, and stop")
    options = parser.parse_args()
    if options.draw:
        import quality_plot

        quality_plot.draw(options.draw)
        return
    source, text = model_file(options.model), texts.split()[1].read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        made = compile_rows(source, Path(folder), options)
        evaluate(made, text, options.windows)
        for row in track(made if options.speed else [], "timing", console=Console(stderr=True)):
            measure_speed(row)
    for row in made:
        del row["path"]
    if options.peer:
        made += map(peer_row, json.loads(options.peer.read_text()))
    if options.output:
        options.output.mkdir(exist_ok=True)
        (options.output / f"{options.model}.json").write_text(json.dumps(made, indent=1) + "\n")
    Console(width=120).print(table(f"{options.model}, {made[0]['tokens']} tokens of Persuasion", made))


if __name__ == "__main__":
    main()
