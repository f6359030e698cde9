"""llmc beside every peer that is installed: same models, same threads, same token ids, by turns.

    python tests/bench/compare.py                                          llmc alone
    python tests/bench/compare.py --peers FOLDER --json all.json --plot all.png
    python tests/bench/compare.py --peers FOLDER --quick
    python tests/bench/compare.py --models smollm2 --systems "llmc q4,llamacpp" --threads 1 --cases single --rounds 1
    python tests/bench/compare.py --from part1.json,part2.json --show --plot all.png

FOLDER/NAME/bin/python is an interpreter that has peer NAME (llamacpp: llama-cpp-python, openvino: openvino-genai,
onnxruntime: onnxruntime-genai, ctranslate2), and FOLDER/models/MODEL/NAME-FORMAT what it reads: a GGUF file or an
export, see peer_quantize.py and peer_export.py. What is not there is left out, and that is said. Every round runs every
case once on each system, each in a process of its own (peer_case.py says how it is asked); a case warms up, then asks
--repeats times, each time with prompts that nobody has read. Greedy, ends ignored.

Cases: single (prefill of 512 tokens, decode of --new-tokens after 16, peak memory), batch (decode of 8 and of 16
sequences), rows (steps of 1 to 16 rows, of llmc), first (start of the process to its first output, files in memory),
neighbour (decode beside a busy core over decode without, two threads), and of llmc, before the rounds, compile
(seconds, memory) and loss (KL against the unquantized model: 4 bytes of memory a weight).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "bench"
sys.path[:0] = [str(ROOT / "examples"), str(HERE)]

import compare_cases as cases
import fetch_smollm2
import gguf
from compare_figures import OURS, Sample, rows_of
from compare_show import draw, show
from models import LFM2, QWEN3_MOE, TINYLLAMA, VOCAB, random_gguf
from rich.console import Console

import llmc
from llmc.cli_bench import weight_bytes_per_step
from llmc.read_speed import read_bytes_per_s
from llmc.runtime.loading.manifest import KvLayout

WORK = ROOT / "build" / "bench"
# The module that an interpreter must have, by peer.
PEERS = {
    "llamacpp": "llama_cpp",
    "openvino": "openvino_genai",
    "onnxruntime": "onnxruntime_genai",
    "ctranslate2": "ctranslate2",
}
CASES: dict[str, Callable[[cases.System, cases.Settings], cases.Samples]] = {
    "single": cases.single,
    "batch 8": partial(cases.batch, 8),
    "batch 16": partial(cases.batch, 16),
    "rows": cases.step_times,
    "first": cases.first_token,
    "neighbour": cases.neighbour,
}
MAKING = ("compile", "loss")
FORMATS = "q8,q5,q4,c4,q3h,Q4_0"  # in capitals: what llama.cpp's file of that name holds, kept as it is
# What --quick leaves: the quickest file of each peer, and by case fewer systems where more would tell nothing new.
PEERS_QUICK = ["llamacpp Q4_0", "llamacpp Q8_0", "openvino int4", "onnxruntime int4", "ctranslate2 int8"]
QUICK: dict[str, Any] = {"rounds": 1, "repeats": 1, "new_tokens": 32, "systems": ["llmc", *PEERS_QUICK]}
QUICK_CASES = {
    **dict.fromkeys(("batch 8", "batch 16"), ["llmc q8", "llmc q4", "llmc Q4_0", *PEERS_QUICK]),
    **dict.fromkeys(("first", "neighbour"), ["llmc q4", "llamacpp Q4_0"]),
    "rows": ["llmc q4"],
}


@dataclass
class Bench:
    """What is measured, and what came of it."""

    console: Console
    output: Path | None
    asked: dict[str, Any]
    quick: bool = False
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, model: str, threads: int, system: str, found: cases.Samples, round: int = 0) -> None:
        """Keep the samples, on disk too."""
        for measure, values in found.items():
            key = {"model": model, "threads": threads, "system": system, "measure": measure}
            self.samples += [{**key, "value": value, "round": round} for value in values]
        self._write()

    def fail(self, what: str, error: Exception) -> None:
        """Keep that this did not work."""
        self.failures.append(f"{what}: {error}")
        self.console.print(f"[red]{what}: {error}")
        self._write()

    def _write(self) -> None:
        if self.output is not None:
            whole = {"asked": self.asked, "failures": self.failures, "samples": self.samples}
            self.output.write_text(json.dumps(whole, indent=1) + "\n")


def main() -> None:
    """Measure, or take what was measured; print tables, write the plot."""
    options = _options()
    console = Console(width=options.width)
    asked = {name: str(value) for name, value in vars(options).items() if name in _RECORDED}
    bench = Bench(Console(stderr=True), options.json, asked, options.quick)
    for path in options.from_files:
        whole = json.loads(Path(path).read_text())
        bench.samples += whole["samples"]
        bench.failures += whole["failures"]
    if not options.show:
        measure(bench, options)
    rows = rows_of(bench.samples)
    show(rows, console, options.markdown)
    for threads in sorted({row.threads for row in rows} - {0}):
        reads = [s["value"] for s in bench.samples if s["measure"] == "read bytes/s" and s["threads"] == threads]
        if reads:
            console.print(f"read limit on {threads}: {max(reads) / 1e9:.1f} GB/s, the best of {len(reads)}")
    for failure in bench.failures:
        console.print(f"failed: {failure}", style="red", highlight=False)
    if options.plot:
        draw(rows, options.plot)


def measure(bench: Bench, options: argparse.Namespace) -> None:
    """Compile what is asked for, then run the rounds."""
    begun = time.monotonic()
    models = {name: source() for name, source in SOURCES.items() if name in options.models}
    systems = {name: ours(bench, name, source, options) for name, source in models.items()}
    for name in models:
        systems[name] += peers(bench, name, options)
        systems[name] = [each for each in systems[name] if _wanted(each.name, options.systems)]
    wanted = [name for name in CASES if name.split()[0] in options.cases]
    for number in range(options.rounds):
        for threads, name in itertools.product(options.threads, models):
            read = read_bytes_per_s(threads, clock=time.process_time if options.cpu_time else time.perf_counter)
            bench.add(name, threads, "machine", {"read bytes/s": [read]}, number)
            settings = cases.Settings(threads, options.repeats, options.new_tokens, options.cpu_time)
            for case in wanted:
                if case == "neighbour" and threads < 2:
                    continue
                _turns(bench, case, name, systems[name], settings, number)
        minutes = (time.monotonic() - begun) / 60
        bench.console.print(f"round {number + 1} of {options.rounds} done after {minutes:.1f} minutes")


def _turns(
    bench: Bench, case: str, model: str, systems: list[cases.System], settings: cases.Settings, number: int
) -> None:
    """One case on every system in turn, in the other order every other round."""
    only = [OURS] if case == "rows" else []
    if bench.quick:
        only = QUICK_CASES.get(case, only)
    for system in systems if number % 2 == 0 else systems[::-1]:
        if not _wanted(system.name, only):
            continue
        start = time.monotonic()
        try:
            found = CASES[case](system, settings)
        except (cases.CaseError, OSError, ValueError, IndexError) as error:
            bench.fail(f"{model}, {settings.threads} threads, {case}, {system.name}", error)
            continue
        bench.add(model, settings.threads, system.name, found, number)
        bench.console.print(
            f"{model}, {settings.threads} threads, {case}, {system.name}: {time.monotonic() - start:.0f} s"
        )


def ours(bench: Bench, model: str, source: Path, options: argparse.Namespace) -> list[cases.System]:
    """llmc with every format, compiled where it is not there yet or is asked for.

    A format in capitals is that of a peer's GGUF file, whose weights llmc keeps: its loss is what the int8 activations
    make of them. After a colon stand other activations, as in q4:bf16.
    """
    systems, copied = [], ("--copy-weights",) if options.copy_weights else ()
    for format in options.formats:
        name, path = f"{OURS} {format}", WORK / f"compare-{model}-{format.replace(':', '-')}.llmc"
        if not _wanted(name, options.systems):
            continue
        stored, _, activations = format.partition(":")
        read, asked = source, cases.Asked(stored, activations or "auto")
        if stored.isupper():
            read = Path(options.peers or "", "models", model, f"llamacpp-{stored}.gguf")
            asked = replace(asked, quant="auto")
            if not read.is_file():
                bench.console.print(f"{name} is left out of {model}: no {read}")
                continue
        try:
            if not options.keep or not path.exists():
                found = cases.compile_case(read, path, asked)
                bench.add(model, 0, name, found if "compile" in options.cases else {})
            if "loss" in options.cases:
                bench.add(model, 0, name, cases.loss_case(read, WORK, asked))
            llmc.load(path).close()  # hashes the weights, once
        except cases.CaseError as error:
            bench.fail(f"{model}, compile, {name}", error)
            continue
        bench.console.print(f"{model}, {name} is ready")
        bench.add(model, 0, name, _sizes(path, model))
        systems.append(cases.System(name, sys.executable, str(HERE / "llmc_case.py"), str(path), VOCAB, copied))
    return systems


def _sizes(artifact: Path, model: str) -> cases.Samples:
    manifest = json.loads((artifact / "manifest.json").read_text())
    size = sum(file.stat().st_size for file in artifact.rglob("*") if file.is_file())
    kv = manifest["kv"]
    layout = KvLayout(kv["layers"], kv["kv_heads"], kv["head_dim"], kv["dtype"])
    held = (artifact / manifest["weights"]["file"]).stat().st_size + layout.token_bytes * (cases.PROMPT + 1)
    read = _read_sizes(weight_bytes_per_step(artifact, manifest), model)
    return {**read, "held MB": [held / 1e6], "artifact MB": [size / 1e6]}


def _read_sizes(step_bytes: float, model: str) -> cases.Samples:
    return {"bits/weight": [8 * step_bytes / WEIGHTS[model][0]], "step bytes": [step_bytes]}


def peers(bench: Bench, model: str, options: argparse.Namespace) -> list[cases.System]:
    """Every file of every peer that is installed."""
    systems = []
    for peer, module in PEERS.items():
        if options.peers is None:
            continue
        python = options.peers / peer / "bin" / "python"
        version = _version(python, module)
        if version is None:
            bench.console.print(f"{peer} is left out: {python} has no {module}")
            continue
        bench.asked[peer] = version
        found = sorted((options.peers / "models" / model).glob(f"{peer}-*"))
        if not found:
            bench.console.print(f"{peer} is left out of {model}: no {options.peers}/models/{model}/{peer}-*")
        for path in found:
            name = f"{peer} {path.name.removeprefix(peer + '-').removesuffix('.gguf')}"
            if _wanted(name, options.systems):
                bench.add(model, 0, name, _peer_sizes(peer, path, model))
                systems.append(cases.System(name, str(python), str(HERE / f"peer_{peer}.py"), str(path), VOCAB))
    return systems


def _version(python: Path, module: str) -> str | None:
    """Of a peer's module, None where the interpreter is not there or has none."""
    if not python.exists():
        return None
    bare = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", f"import {module}; print({module}.__version__)"]
    done = subprocess.run(command, env=bare, capture_output=True, text=True)
    return None if done.returncode else done.stdout.strip()


def _peer_sizes(peer: str, path: Path, model: str) -> cases.Samples:
    """Bytes that a step reads of a peer's file, and bits of each weight that it reads."""
    if path.is_dir():
        if model in EXPERTS_READ:
            return {}  # nothing tells experts from the rest
        names = ("*.bin", "*.onnx.data")
        size = sum(f.stat().st_size for name in names for f in path.glob(name) if "tokenizer" not in f.name)
        return _read_sizes(size - WEIGHTS[model][1] * EMBEDDING_BITS[peer] / 8, model)
    tensors = {tensor.name: float(tensor.n_bytes) for tensor in gguf.GGUFReader(str(path)).tensors}
    for name in tensors:
        tensors[name] *= EXPERTS_READ.get(model, 1) if name.endswith("_exps.weight") else 1
    looked_up = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    return _read_sizes(sum(tensors.values()) - looked_up, model)


def _wanted(name: str, asked: list[str]) -> bool:
    return not asked or any(name.startswith(each) for each in asked)


SOURCES: dict[str, Callable[[], Path]] = {
    "smollm2": lambda: Path(fetch_smollm2.fetch()),
    "1.1b": lambda: random_gguf(WORK, TINYLLAMA, "q8", Path(fetch_smollm2.fetch())),
    "lfm2": lambda: random_gguf(WORK, LFM2, "q8", Path(fetch_smollm2.fetch())),
    "moe": lambda: random_gguf(WORK, QWEN3_MOE, "q8", Path(fetch_smollm2.fetch())),
}
USUAL = ["smollm2", "1.1b"]  # what a run without --models measures; of more, 4 bytes a weight would not fit everywhere
# Weights that a step of one row reads, and those in an embedding that it only looks up, of which it reads next to none.
WEIGHTS = {"smollm2": (134_515_008, 0), "1.1b": TINYLLAMA.weights(), "lfm2": LFM2.weights(), "moe": QWEN3_MOE.weights()}
EXPERTS_READ = {"moe": QWEN3_MOE.used / QWEN3_MOE.experts}  # of all
EMBEDDING_BITS = {"openvino": 8, "onnxruntime": 32, "ctranslate2": 8}  # what the exporters make of such an embedding
_RECORDED = (
    "models", "formats", "systems", "threads", "cases", "rounds", "repeats", "new_tokens", "cpu_time", "keep",
    "copy_weights",
)  # fmt: skip


def _options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [each for each in text.split(",") if each]

    def one_of(known: Any, text: str) -> list[str]:
        wrong = set(words(text)) - set(known)
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))}: not among {', '.join(known)}")
        return words(text)

    every_case = list(dict.fromkeys([*(name.split()[0] for name in CASES), *MAKING]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peers", type=Path, metavar="FOLDER", help="interpreters and models of the peers")
    add("--models", type=partial(one_of, SOURCES), default=USUAL, help="of: " + ",".join(SOURCES))
    add(
        "--formats",
        type=words,
        default=words(FORMATS),
        help=f"of llmc, by default {FORMATS}; q4:bf16 for other activations",
    )
    add("--systems", type=words, default=[], help="only those whose names begin so, such as 'llmc q4,openvino'")
    add("--threads", type=lambda text: [int(each) for each in words(text)], default=[1, 2])
    add("--cases", type=partial(one_of, every_case), help="of: " + ",".join(every_case))
    add("--rounds", type=int, default=3)
    add("--repeats", type=int, default=2, help="of what is asked of each process")
    add("--new-tokens", type=int, default=128)
    add("--quick", action="store_true", help="one round, one repeat, 32 new tokens, fewer systems, no loss")
    add("--keep", action="store_true", help="use artifacts that are there, whatever compiled them")
    add("--cpu-time", action="store_true", help="seconds of the CPU, for one thread on a machine with other work")
    add("--copy-weights", action="store_true", help="llmc has its weights in memory of its own")
    add("--json", type=Path, help="write every sample there, as they come")
    add("--plot", type=Path, help="write a PNG there; needs matplotlib")
    add("--from", dest="from_files", type=words, default=[], help="samples of earlier runs, which are added")
    add("--show", action="store_true", help="measure nothing")
    add("--markdown", action="store_true", help="tables as docs/measured.md has them")
    add("--width", type=int, default=170, help="of the tables")
    options = parser.parse_args()
    if options.quick:
        asked = vars(options)
        asked.update({name: value for name, value in QUICK.items() if not (name == "systems" and asked[name])})
    if options.cases is None:
        options.cases = [name for name in every_case if not (options.quick and name == "loss")]
    if options.cpu_time and options.threads != [1]:
        parser.error("--cpu-time goes with --threads 1")
    return options


if __name__ == "__main__":
    main()
