"""Texts to vectors, beside ONNX Runtime and OpenVINO: all-MiniLM-L6-v2, batches of texts of one length, by turns.

    python tests/bench/encoders.py [--threads 1] [--rounds 3] [--peers FOLDER] [--json]

llmc with weights of 8 bits and in bfloat16; the peers read the same model with int8 weights, an ONNX file that ships in
a package. FOLDER/openvino/bin/python is an interpreter that has openvino. Every system is a process of its own in every
round, warms up, and is asked for each batch several times; the tokens are the same, and no tokenizer is measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples")]

import fetch_minilm
import fetch_onnx
from engine_case import arguments, show

BATCHES = ((1, 16), (1, 128), (8, 128), (32, 64), (8, 256))  # texts, tokens of each
REPEATS = 7


def systems(folder: Path, peers: Path | None) -> dict[str, tuple[str, str, str]]:
    """Name -> interpreter, what opens the model there, path of the model."""
    from llmc.compiler.driver import compile_model

    source, graph, found = fetch_minilm.fetch(), str(fetch_onnx.fetch_minilm()), {}
    for quant in ("q8", "bf16"):
        artifact = compile_model(source, folder / f"{quant}.llmc", quant=quant).path
        found[f"llmc {quant}"] = (sys.executable, "llmc", str(artifact))
    found["onnxruntime int8"] = (sys.executable, "onnxruntime", graph)
    if peers is not None:
        found["openvino int8"] = (str(peers / "openvino" / "bin" / "python"), "openvino", graph)
    return found


def ask(interpreter: str, opener: str, model: str, threads: int) -> list[float]:
    """Median seconds of each batch, in a process of its own."""
    request = json.dumps({"open": opener, "model": model, "threads": threads, "batches": BATCHES, "repeats": REPEATS})
    case = [interpreter, str(HERE / "encoder_case.py")]
    done = subprocess.run(case, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{opener}: {done.stderr[-2000:]}")
    times: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return [statistics.median(each) for each in times]


def rows_of(seconds: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """A row for each batch: tokens a second of each system, medians of the rounds; the first system's over peers'."""
    rows: list[dict[str, Any]] = []
    for place, (texts, tokens) in enumerate(BATCHES):
        medians = {name: statistics.median(each[place] for each in rounds) for name, rounds in seconds.items()}
        first = next(iter(medians))
        row: dict[str, Any] = {"texts": texts, "tokens": tokens}
        row |= {name: round(texts * tokens / mine) for name, mine in medians.items()}
        peers = {name: mine for name, mine in medians.items() if not name.startswith("llmc")}
        row |= {f"{first} / {name}": round(mine / medians[first], 2) for name, mine in peers.items()}
        rows.append(row)
    return rows


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__, threads=1, rounds=3)
    parser.add_argument("--peers", type=Path, help="a folder of interpreters, as compare.py has it")
    options = parser.parse_args()
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        found = systems(Path(folder), options.peers)
        for _ in range(options.rounds):
            for name, (interpreter, opener, model) in found.items():
                seconds[name].append(ask(interpreter, opener, model, options.threads))
    show(f"tokens per second, {options.threads} threads", rows_of(seconds), options.json)


if __name__ == "__main__":
    main()
