"""A real, tiny artifact with an encoder: every way to translate gives the same, in a process without a compiler too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmc.runtime
from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.runtime import Model, RequestError

TEXTS = ["the house is wonderful", "a", "Grüße 🙂", "one two three " * 4, "the end."]
# Drawn, because the likeliest token of random weights is the same for every source.
OPTIONS: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "seed": 6}


@pytest.fixture(scope="module")
def model(tiny_translator: Path) -> Iterator[Model]:
    with llmc.runtime.load(tiny_translator / "tiny.llmc", threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def wanted(model: Model) -> list[list[int]]:
    """What each text alone is translated to."""
    found = [model.translate([text], "en", "fr", **OPTIONS)[0].ids for text in TEXTS]
    assert len({tuple(ids) for ids in found}) == len(TEXTS)
    return found


def test_a_batch_is_what_each_text_is_alone(model: Model, wanted: list[list[int]], tiny_translator: Path) -> None:
    together = model.translate(TEXTS, "en", "fr", **OPTIONS)
    assert [each.ids for each in together] == wanted
    assert [each.text for each in together] == [model.decode(each.ids) for each in together]
    assert [each.ids for each in model.translate(TEXTS, "en", "fr", prefill_chunk=7, **OPTIONS)] == wanted
    assert [each.ids for each in model.translate(TEXTS, "en", "de", **OPTIONS)] != wanted
    assert model.runner.pool.free_pages == model.runner.pool.num_pages
    with llmc.runtime.load(tiny_translator / "tiny.llmc", threads=1, cache_tokens=96) as small:
        assert [each.ids for each in small.translate(TEXTS, "en", "fr", **OPTIONS)] == wanted


def test_what_the_artifact_says(model: Model) -> None:
    manifest = model.manifest
    assert (manifest["task"], sorted(manifest["languages"])) == ("translate", ["de", "en", "fr"])
    assert manifest["kv"]["layers"] == 3  # the encoder's
    assert 0 < manifest["quantization"]["loss"]["kl"] < 0.01
    with pytest.raises(RequestError, match="cannot predict a text"):
        model.evaluate("the house")


def test_measured_formats_are_refused_before_any_work(tiny_translator: Path, tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match="^--bpw: not for a model with an encoder"):
        compile_model(tiny_translator, tmp_path / "x.llmc", bpw=4)
    assert not (tmp_path / "x.llmc").exists()


_ALONE = """
import sys
from llmc.__main__ import main
sys.argv = ["llmc", "translate", *sys.argv[1:]]
try:
    main()
finally:
    loaded = {"tvm", "torch", "transformers", "gguf", "onnx"} & set(sys.modules)
    assert not loaded, loaded
"""


def test_the_command_needs_no_compiler(tiny_translator: Path, wanted: list[list[int]], model: Model) -> None:
    arguments = [
        tiny_translator / "tiny.llmc",
        "--from",
        "en",
        "--to",
        "fr",
        "--max-tokens",
        "9",
        "--temperature",
        "1",
        "--seed",
        str(OPTIONS["seed"]),
    ]
    command = [sys.executable, "-c", _ALONE, *map(str, arguments)]
    lines = "\n\n".join(TEXTS)
    done = subprocess.run([*command, "--json"], input=lines, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["translations"]
    assert [each["ids"] for each in found[::2]] == wanted
    assert {each["text"] for each in found[1::2]} == {""}
    plain = subprocess.run([*command, TEXTS[0]], capture_output=True, timeout=120)
    assert plain.stdout.decode() == model.decode(wanted[0]) + "\n"
