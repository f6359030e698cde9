"""Speed of llmc here, beside the machine's read limit and, if it is installed, llama.cpp on the same GGUF files.

    python tests/bench/speed.py                            llmc alone
    python tests/bench/speed.py --peer OTHER/bin/python    an interpreter that has llama-cpp-python

Rounds are interleaved: each round runs every case of both systems once. Shown are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import fetch_smollm2
from models import VOCAB, tinyllama_gguf
from rich.console import Console
from rich.table import Table

from llmc.bench_case import fixed_prompt
from llmc.cli_bench import weight_bytes_per_step
from llmc.compiler.driver import compile_model

WORK = ROOT / "build" / "bench"
PROMPT, NEW = 512, 64


def main() -> None:
    """Make the models, run the rounds, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python that can import llama_cpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--output", type=Path, default=WORK / "speed.json")
    options = parser.parse_args()
    console = Console()
    cases = _cases([int(n) for n in options.threads.split(",")], console)
    for number in range(options.rounds):
        for case in cases:
            console.print(f"round {number + 1}/{options.rounds}: {case['name']}, {case['threads']} threads")
            _round(case, options.peer)
    rows = [_row(case) for case in cases]
    _show(console, rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")


def _cases(threads: list[int], console: Console) -> list[dict[str, Any]]:
    smollm2 = Path(fetch_smollm2.fetch())
    models = {"SmolLM2-135M q4": (smollm2, "q4")}
    for quant in ("q8", "q4"):
        console.print(f"making the 1.1B shape, {quant}")
        models[f"1.1B {quant}"] = (tinyllama_gguf(WORK, quant, smollm2), quant)
    cases = []
    for name, (gguf, quant) in models.items():
        artifact = WORK / f"{name.replace(' ', '-')}.llmc"
        seconds = compile_model(gguf, artifact, quant=quant).seconds
        console.print(f"compiled {name} in {seconds:.1f} s")
        case = {"name": name, "gguf": str(gguf), "artifact": str(artifact), "compile_s": seconds, "runs": []}
        cases += [{**case, "runs": [], "threads": count} for count in threads]
    return cases


def _json(python: str, arguments: list[str]) -> Any:
    done = subprocess.run([python, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _round(case: dict[str, Any], peer: str | None) -> None:
    run: dict[str, Any] = {}
    here = sys.executable
    run["read"] = _json(here, ["-m", "llmc.bench_case", json.dumps({"only_read": True, "threads": case["threads"]})])
    sizes = {"artifact": case["artifact"], "threads": case["threads"], "batch": 1, "repeats": 1}
    run["llmc"] = _json(
        here, ["-m", "llmc.bench_case", json.dumps({**sizes, "prompt_tokens": PROMPT, "new_tokens": NEW})]
    )
    if peer:
        request = {
            "model": case["gguf"], "threads": case["threads"], "new_tokens": NEW, "repeats": 1,
            "prompt": fixed_prompt(0, PROMPT, VOCAB),
        }  # fmt: skip
        run["peer"] = _json(peer, [str(ROOT / "tests" / "bench" / "peer_llamacpp.py"), json.dumps(request)])
    run["first_token_s"] = _first_token(case)
    case["runs"].append(run)


def _first_token(case: dict[str, Any]) -> float:
    """Seconds from starting `llmc run` to its first byte of text, files in the page cache."""
    command = [
        sys.executable, "-m", "llmc", "run", case["artifact"], "Hello", "--raw", "--max-tokens", "4", "--ignore-eos",
        "--threads", str(case["threads"]),
    ]  # fmt: skip
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.communicate()
    return seconds


def _row(case: dict[str, Any]) -> dict[str, Any]:
    def median(*path: str) -> float:
        values = []
        for run in case["runs"]:
            value = run
            for key in path:
                value = value[key]
            values.append(value[0] if isinstance(value, list) else value)
        return statistics.median(values)

    artifact = Path(case["artifact"])
    step_bytes = weight_bytes_per_step(artifact, json.loads((artifact / "manifest.json").read_text()))
    read = max(run["read"]["read_bytes_per_s"] for run in case["runs"])
    row = {
        "model": case["name"], "threads": case["threads"], "compile_s": case["compile_s"],
        "prefill": median("llmc", "prefill"), "decode": median("llmc", "decode"), "load_s": median("llmc", "load_s"),
        "first_token_s": median("first_token_s"), "peak_rss_mb": median("llmc", "peak_rss_mb"),
        "step_bytes": step_bytes, "read_bytes_per_s": read,
    }  # fmt: skip
    row["limit"] = read / step_bytes
    if "peer" in case["runs"][0]:
        row |= {"peer_prefill": median("peer", "prefill"), "peer_decode": median("peer", "decode")}
    return {**row, "runs": case["runs"]}


def _show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"batch 1, prompt {PROMPT}, {NEW} new tokens; medians")
    heads = "model|threads|prefill tok/s|prefill/decode|decode tok/s|read limit tok/s|of limit|load s|first token s|MB"
    for head in heads.split("|"):
        table.add_column(head, justify="left" if head == "model" else "right")
    with_peer = "peer_decode" in rows[0]
    if with_peer:
        for head in ("llama.cpp prefill", "ratio", "llama.cpp decode", "ratio"):
            table.add_column(head, justify="right")
    for row in rows:
        cells = [
            row["model"], str(row["threads"]), f"{row['prefill']:.0f}", f"{row['prefill'] / row['decode']:.1f}",
            f"{row['decode']:.1f}", f"{row['limit']:.1f}", f"{row['decode'] / row['limit']:.0%}",
            f"{row['load_s']:.2f}", f"{row['first_token_s']:.2f}", f"{row['peak_rss_mb']:.0f}",
        ]  # fmt: skip
        if with_peer:
            cells += [
                f"{row['peer_prefill']:.0f}", f"{row['prefill'] / row['peer_prefill']:.2f}",
                f"{row['peer_decode']:.1f}", f"{row['decode'] / row['peer_decode']:.2f}",
            ]  # fmt: skip
        table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
