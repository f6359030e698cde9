"""The command on a real artifact: a tiny random model, from folder to answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.loading.cpu import default_threads


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama()


def call(*arguments: str | Path, stdin: str = "") -> Any:
    """Return what `llmc ... --json` prints, parsed; lines of objects become a list."""
    command = [sys.executable, "-m", "llmc", *map(str, arguments), "--json"]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    if arguments[0] == "chat":
        return [json.loads(line) for line in done.stdout.splitlines()]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def artifact(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "tiny.llmc"
    result = call("compile", folder, "-o", path, "--quant", "q8")
    assert list(result) == ["path", "seconds", "bytes", "bits_per_weight", "format", "loss", "tuned", "slow"]
    assert 0 < result["loss"]["kl"] < 0.05
    assert result["bytes"] == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    assert (result["format"], result["slow"]) == ("q8", [])
    return path


def test_a_format_that_is_looked_up_slowly_is_named(folder: Path, tmp_path: Path) -> None:
    options = ("--quant", "c3h", "--target", "cpu:avx2", "--no-check")
    command = [sys.executable, "-m", "llmc", "compile", folder, "-o", tmp_path / "tiny.llmc", *options]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "note: c3h: an x86 CPU without AVX-512 VBMI looks these codes up slowly" in said


def test_inspect_and_verify_agree_on_the_size(artifact: Path) -> None:
    manifest, verified = call("inspect", artifact), call("verify", artifact)
    assert manifest["bytes"] == verified["bytes"]
    assert verified["intact"] is True


def test_run_continues_ids_it_reports(artifact: Path) -> None:
    one = call("run", artifact, "one two", "--raw", "--max-tokens", "5", "--ignore-eos")
    assert len(one["ids"]) == 5
    assert one["finish_reason"] == "length"
    assert one == {**call("run", artifact, "-", "--raw", "--max-tokens", "5", "--ignore-eos", stdin="one two"),
                   "timings": one["timings"]}  # fmt: skip


def test_a_seed_decides_what_is_sampled(artifact: Path) -> None:
    flags = ("--raw", "--max-tokens", "12", "--ignore-eos", "--temperature", "1.5")
    first, again, other = (call("run", artifact, "one", *flags, "--seed", s)["ids"] for s in ("1", "1", "2"))
    assert first == again != other


def test_chat_over_a_pipe_answers_each_line(artifact: Path) -> None:
    answers = call("chat", artifact, "--max-tokens", "3", stdin="one\ntwo\n")
    assert [list(answer) for answer in answers] == [["text", "ids", "finish_reason", "timings"]] * 2


def test_spec_of_a_folder_fits_the_folder(folder: Path, tmp_path: Path) -> None:
    text = subprocess.run([sys.executable, "-m", "llmc", "spec", folder], capture_output=True, text=True, check=True)
    (tmp_path / "tiny.toml").write_text(text.stdout, encoding="utf-8")
    assert call("spec", folder, "--check", tmp_path / "tiny.toml") == {"fits": True, "differences": []}
    assert call("spec", folder)["sizes"]["layers"] == 2


def test_bench_has_a_row_for_each_case(artifact: Path) -> None:
    sizes = ("--prompt-tokens", "32", "--new-tokens", "8", "--repeats", "2")
    rows = call("bench", artifact, *sizes, "--batch", "1,3", "--threads", "1,2")
    counts = [1] if default_threads() == 1 else [1, 2]  # no more than there are CPUs
    assert [(row["threads"], row["batch"]) for row in rows] == [(n, b) for n in counts for b in (1, 3)]
    for row in rows:
        low, high = row["spread"]["decode_tokens_per_s"]
        assert 0 < low <= row["decode_tokens_per_s"] <= high
        assert 0 < row["load_s"] < 10
        assert 10 < row["peak_rss_mb"] < 2000
        assert row["weight_bytes_per_step"] < (artifact / "weights.safetensors").stat().st_size
        assert row["read_bytes_per_s"] > 1e8


def test_bench_beyond_the_context_is_refused(artifact: Path) -> None:
    sizes = ["--prompt-tokens", "250", "--new-tokens", "50", "--batch", "1", "--threads", "1"]
    command = [sys.executable, "-m", "llmc", "bench", str(artifact), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "context" in done.stderr


def test_ctrl_c_is_quiet(artifact: Path) -> None:
    command = [sys.executable, "-u", "-m", "llmc", "chat", str(artifact), "--max-tokens", "3"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        process.stdout.read(1)  # it is loaded and answers
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == ""
