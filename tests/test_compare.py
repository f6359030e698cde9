"""The arithmetic of tests/bench/compare.py, and its questions to llmc on a tiny model; peers are not run here."""

from __future__ import annotations

import doctest
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

BENCH = "tests/bench/"


@pytest.fixture(scope="module")
def parts(script: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    """The bench's modules by name, in the order in which they import each other."""
    return {name: script(f"{BENCH}compare_{name}.py") for name in ("figures", "cases", "show")}


def samples() -> list[dict[str, Any]]:
    """Two of our formats and two peers, on one thread; the machine reads 10 GB/s at its best."""
    found: list[dict[str, Any]] = []

    def add(system: str, threads: int, **measures: Any) -> None:
        for measure, values in measures.items():
            for round, value in enumerate(values if isinstance(values, list) else [values]):
                key = {"model": "m", "threads": threads, "system": system, "measure": measure.replace("_", " ")}
                found.append({**key, "value": value, "round": round})

    found += [
        {"model": "m", "threads": 1, "system": "machine", "measure": "read bytes/s", "value": value, "round": 0}
        for value in (8e9, 10e9)
    ]
    for system, size, bits in (("llmc q8", 1e9, 8.5), ("llmc q4", 5e8, 5.0), ("a 8", 1e9, 8.5), ("b 4", 4e8, 4.5)):
        found.append(
            {"model": "m", "threads": 0, "system": system, "measure": "bits/weight", "value": bits, "round": 0}
        )
        add(system, 0, step_bytes=size)
    add("llmc q4", 0, held_MB=50.0)
    add("llmc q8", 1, decode=[8.0, 9.0, 8.5], peak_MB=100.0)
    add("llmc q4", 1, decode=[16.0, 10.0, 20.0], peak_MB=60.0)
    add("a 8", 1, decode=[4.0, 5.0, 3.0], peak_MB=200.0)
    add("b 4", 1, decode=[8.0], peak_MB=30.0)
    add("llmc q4", 0, KL=0.25, compile_s=[7.0, 9.0])
    for m, seconds in ((1, 0.1), (4, 0.15), (16, 0.3)):
        add("llmc q4", 1, **{f"step_{m}": [seconds, seconds, 9.0]})
    return found


def test_medians_spread_and_the_share_of_the_limit(parts: dict[str, ModuleType]) -> None:
    rows = {row.system: row for row in parts["figures"].rows_of(samples()) if row.threads}
    assert list(rows) == ["llmc q8", "llmc q4", "a 8", "b 4"]  # ours first
    assert rows["llmc q4"].figures["decode"] == parts["figures"].Figure(16.0, 10 / 16, 3)
    assert rows["llmc q8"].of_limit == pytest.approx(8.5 * 1e9 / 10e9)
    assert rows["llmc q4"].of_limit == pytest.approx(16 * 5e8 / 10e9)
    assert parts["figures"].costs(rows["llmc q4"]) == pytest.approx({1: 1.0, 4: 1.5, 16: 3.0})
    assert parts["figures"].costs(rows["b 4"]) == {}


def test_ratios_are_between_equal_bits_and_say_how_many_times_better_we_are(parts: dict[str, ModuleType]) -> None:
    figures = parts["figures"]
    rows = [row for row in figures.rows_of(samples()) if row.threads]
    by_name = {row.system: row for row in rows}
    assert figures.equal_bits(by_name["a 8"], rows).system == "llmc q8"
    assert figures.equal_bits(by_name["b 4"], rows).system == "llmc q4"  # never one of fewer bits than the peer's
    assert figures.best_peer(rows, "decode").system == "b 4"
    assert figures.best_peer(rows, "peak MB").system == "b 4"  # less is better
    assert figures.best_peer(rows, "prefill") is None
    assert figures.times_better(by_name["llmc q8"], by_name["a 8"], "decode") == pytest.approx(8.5 / 4)
    assert figures.times_better(by_name["llmc q8"], by_name["a 8"], "peak MB") == pytest.approx(2)
    assert figures.times_better(by_name["llmc q8"], by_name["a 8"], "prefill") is None


def test_tables_show_it(parts: dict[str, ModuleType]) -> None:
    out = io.StringIO()
    parts["show"].show(parts["figures"].rows_of(samples()), Console(file=out, width=150))
    lines = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in out.getvalue().splitlines()
    ]
    assert ["llmc q4", "5.00", "0.25", "16.0 ±31%", "60.0", "1.20", "80%"] in lines
    assert ["than b 4", "llmc q4", "2.00", "0.50"] in lines
    assert ["the best peer", "", "b 4", "b 4"] in lines
    assert ["than the best peer", "llmc q8", "1.06", "0.30"] in lines
    assert ["llmc q4", "1.00", "", "1.50", "", "3.00"] in lines
    assert ["m llmc q4", "8.00", "", "", "", "5.00", "0.25", ""] in lines


@pytest.mark.parametrize("name", ["figures", "cases", "show"])
def test_docstring_examples(parts: dict[str, ModuleType], name: str) -> None:
    failed, tried = doctest.testmod(parts[name])
    assert tried > 0
    assert failed == 0


def test_what_was_measured_is_shown_again(root: Path, tmp_path: Path) -> None:
    files = []
    for number, half in enumerate((samples()[::2], samples()[1::2])):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"asked": {}, "failures": [f"failure {number}"], "samples": half}))
    command = [sys.executable, str(root / BENCH / "compare.py"), "--from", ",".join(map(str, files)), "--show"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "16.0 ±31%" in done.stdout
    assert "failure 0" in done.stdout
    assert "failure 1" in done.stdout
    assert "read limit on 1: 10.0 GB/s, the best of 2" in done.stdout


def test_every_case_of_llmc(parts: dict[str, ModuleType], root: Path, tiny_llama: Any, tmp_path: Path) -> None:
    cases = parts["cases"]
    source, artifact = tiny_llama(max_position_embeddings=1024), tmp_path / "tiny.llmc"
    found = cases.compile_case(source, artifact, cases.Asked("q8", "auto"))
    assert found["compile s"][0] > 0
    assert found["compile MB"][0] > 1
    system = cases.System("llmc q8", sys.executable, str(root / BENCH / "llmc_case.py"), str(artifact), 320)
    settings = cases.Settings(threads=1, repeats=1, new_tokens=5, cpu_time=True)
    found = {
        **cases.single(system, settings), **cases.batch(3, system, settings), **cases.step_times(system, settings),
        **cases.neighbour(system, settings), **cases.first_token(system, settings),
    }  # fmt: skip
    once = ["prefill", "decode", "batch 3", "busy", "first token s", *(f"step {m}" for m in parts["figures"].ROWS)]
    assert {name: len(values) for name, values in found.items() if name in once} == dict.fromkeys(once, 1)
    assert all(value > 0 for values in found.values() for value in values)
    missing = cases.System("llmc q8", sys.executable, system.script, str(tmp_path / "none.llmc"), 320)
    for case in (cases.single, cases.first_token):
        with pytest.raises(cases.CaseError):
            case(missing, settings)
