"""`llmc eval`: what it prints, and what it refuses, on tiny artifacts and on the demo model."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmc
from llmc.cli import command
from llmc.compiler.driver import compile_model

TEXT = "The capital of France is Paris. one two three four five six seven, naïve café. " * 20
COMPARED = {
    "kl_standard_error", "kl_median", "kl_99_percent", "kl_max", "top1_standard_error", "against_perplexity",
    "against_perplexity_standard_error", "perplexity_ratio", "perplexity_ratio_standard_error", "against",
}  # fmt: skip


def llmc_eval(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["eval", *map(str, arguments)])


def figures(*arguments: str | Path) -> dict[str, Any]:
    result = llmc_eval(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def refused(*arguments: str | Path, code: int = 1) -> str:
    """Return the only line on standard error, after checking that it is the only line."""
    result = llmc_eval(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("llmc: ")
    return line


@pytest.fixture(scope="module")
def make(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function `(quant="f32", folder=None, **config) -> artifact` of a tiny random model."""
    made = tmp_path_factory.mktemp("eval")

    def artifact(quant: str = "f32", folder: Path | None = None, **config: Any) -> Path:
        path = made / f"{len(list(made.iterdir()))}.llmc"
        compile_model(str(folder or tiny_llama(**config)), str(path), quant=quant)
        return path

    return artifact


@pytest.fixture(scope="module")
def exact(make: Callable[..., Path]) -> Path:
    return make()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_json_holds_the_figures_of_the_python_interface(exact: Path, text: Path) -> None:
    found = figures(exact, "--text", text, "--window", "64")
    assert {"perplexity", "tokens", "kl", "top1_agreement", "bits_per_weight", "bytes", "tokens_per_s"} <= set(found)
    assert (found["kl"], found["top1_agreement"], found["bits_per_weight"]) == (None, None, 32.0)
    assert not COMPARED & set(found)
    assert found["tokens"] == found["windows"] * 63
    assert found["bytes"] == sum(file.stat().st_size for file in exact.rglob("*") if file.is_file())
    with llmc.load(exact) as model:
        same = model.evaluate(TEXT, window=64)
        again = model.evaluate(model.encode(TEXT), 64, most_windows=1)
    assert found == {**found, **same.figures(), "seconds": found["seconds"], "tokens_per_s": found["tokens_per_s"]}
    assert (again.nll == same.nll[:63]).all()


def test_against_another_artifact(make: Callable[..., Path], exact: Path, text: Path) -> None:
    options = ("--text", text, "--window", "64")
    found = figures(make("q8"), *options, "--against", exact)
    assert set(found) >= COMPARED
    assert found["against"]["artifact"] == str(exact)
    assert found["against"]["bits_per_weight"] == 32.0
    assert found["against_perplexity"] == pytest.approx(figures(exact, *options)["perplexity"], rel=1e-12)
    assert 0 < found["kl_median"] <= found["kl_99_percent"] <= found["kl_max"] < 1
    assert 0.5 < found["top1_agreement"] <= 1
    assert found["perplexity_ratio"] == pytest.approx(found["perplexity"] / found["against_perplexity"])
    itself = figures(exact, *options, "--against", exact)
    assert (itself["kl_max"], itself["top1_agreement"], itself["perplexity_ratio"]) == (0, 1, 1)


def test_what_a_person_reads(exact: Path, text: Path) -> None:
    alone = llmc_eval(exact, "--text", text, "--window", "64", "--windows", "2").stdout
    names = [line.split("  ")[0] for line in alone.splitlines()]
    assert names == ["artifact", "weights", "size", "perplexity", "text", "scored", "speed"]
    assert "126 tokens, 2 windows of 64\n" in alone
    both = llmc_eval(exact, "--text", text, "--window", "64", "--against", exact, "--bos", "yes").stdout
    assert "same first choice  100.00% +/- 0.00%" in both
    assert "each after the model's first token" in both


def test_a_text_of_one_short_window(exact: Path, text: Path) -> None:
    text.write_text("one two", encoding="utf-8")
    found = figures(exact, "--text", text, "--window", "256")
    assert (found["windows"], found["window"]) == (1, found["text_tokens"])


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "text: it is empty"), (b"a", "text: it is 1 token"), (b"ab\xff", "text.txt: not valid UTF-8: byte 2 is 0x")],
)
def test_texts_that_are_refused(exact: Path, text: Path, content: bytes, says: str) -> None:
    text.write_bytes(content)
    assert says in refused(exact, "--text", text, "--window", "64")


def test_files_that_are_not_there(exact: Path, text: Path) -> None:
    none = text.parent / "none"
    assert f"{none}: no such file" in refused(exact, "--text", none)
    assert "is a directory" in refused(exact, "--text", text.parent)
    assert f"{none}: no such artifact" in refused(none, "--text", text)
    assert f"{none}: no such artifact" in refused(exact, "--text", text, "--against", none)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--window", "1"], "--window"),
        (["--windows", "0"], "--windows"),
        (["--bos", "perhaps"], "--bos"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_wrong_usage(exact: Path, text: Path, options: list[str], says: str) -> None:
    assert says in refused(exact, "--text", text, *options, code=2)


def test_a_text_must_be_named(exact: Path) -> None:
    assert "--text" in refused(exact, code=2)


def test_a_window_longer_than_a_context(make: Callable[..., Path], exact: Path, text: Path) -> None:
    assert "window: got 512 tokens, and the model's context is 256" in refused(exact, "--text", text)
    short = make(max_position_embeddings=32)
    line = refused(exact, "--text", text, "--window", "64", "--against", short)
    assert "against: window: got 64 tokens, and the model's context is 32" in line


def test_models_of_other_tokens_are_not_compared(
    make: Callable[..., Path], exact: Path, text: Path, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    options = ("--text", text, "--window", "64", "--against")
    assert "a vocabulary of 310 tokens, this one of 320" in refused(exact, *options, make(vocab_size=310))
    folder = Path(shutil.copytree(tiny_llama(), tmp_path / "swapped"))
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = document["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    assert "that model's tokenizer is another one" in refused(exact, *options, make(folder=folder))


def test_ctrl_c_is_quiet(exact: Path, text: Path) -> None:
    text.write_text(TEXT * 2000, encoding="utf-8")
    arguments = [sys.executable, "-m", "llmc", "eval", str(exact), "--text", str(text), "--window", "64"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(2)
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors.strip()) == (130, "", "")


@pytest.mark.model
@pytest.mark.thorough
def test_the_demo_model_on_real_text(smollm2_artifact: Callable[..., Path], root: Path) -> None:
    text = root / "LICENSE"
    found = figures(smollm2_artifact("q4"), "--text", text, "--against", smollm2_artifact("f32"), "--windows", "2")
    assert (found["tokens"], found["windows"], found["bos"]) == (1022, 2, False)
    assert 10 < found["perplexity"] < 40
    assert abs(math.log(found["perplexity_ratio"])) < 0.02
    assert 0.001 < found["kl"] < 0.010
    assert found["top1_agreement"] > 0.93
