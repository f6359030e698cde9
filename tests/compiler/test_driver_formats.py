"""Which format each matrix gets: kept, asked for, listed in a recipe, or chosen by measurement within a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import CompileResult, compile_model, sources
from llmc.compiler.driver.recipe import matrix_names, recipe_text, uniform
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS
from llmc.frontends.source import open_model
from llmc.frontends.tensor import Tensor
from llmc.runtime.loading import integrity

pytestmark = pytest.mark.usefixtures("plain_code")

TEXT = "the quick brown fox jumps over the lazy dog and says hello to the world, again and again. " * 60


@pytest.fixture(scope="module")
def tiny(tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _stored_bytes(result: CompileResult) -> int:
    manifest = json.loads((result.path / "manifest.json").read_text())
    raw = (result.path / "weights.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return sum(
        header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in manifest["weights"]["order"]
    )


@pytest.mark.model
def test_a_quantized_checkpoint_is_kept_and_floats_become_q8(smollm2_gguf: Path, tiny: Path, tmp_path: Path) -> None:
    with open_model(smollm2_gguf) as model:
        kept = {name: model.tensors[name].kept for name in matrix_names(model.spec)}
    result = compile_model(smollm2_gguf, tmp_path / "a.llmc")
    assert result.formats == kept
    assert set(kept.values()) == {"q4", "q8"}
    assert set(compile_model(tiny, tmp_path / "b.llmc").formats.values()) == {"q8"}


@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q3h", "c4", "r4"])
def test_a_matrix_read_in_pieces_is_packed_as_one(format: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [("layers.0.q", "layers.0.k", "layers.0.v"), ("embedding",)]
    with open_model(tiny) as model:
        read = sources.ModelSources(model)
        wholes = [FORMATS[format].pack(read.stacked(names)) for names in matrices]
        monkeypatch.setattr(sources, "_PIECE", 1)  # a tile
        monkeypatch.setattr(Tensor, "read", None)  # no matrix as a whole
        for names, whole in zip(matrices, wholes, strict=True):
            assert len(whole) > 3
            np.testing.assert_array_equal(read.pack(format, names), whole)


def test_a_matrix_stored_the_other_way_round_is_read_once(tiny_model: Callable[..., Path]) -> None:
    """GPT-2 stores columns as rows: of such a matrix some rows cost as much as all."""
    with open_model(tiny_model("gpt2")) as model:
        read = sources.ModelSources(model)
        turned = {name: tensor.by_rows for name, tensor in model.tensors.items() if len(tensor.shape) == 2}
        assert set(turned.values()) == {True, False}
        for name, by_rows in turned.items():
            assert read.in_pieces(FORMATS["q8"], (name,)) == by_rows


def test_the_vocabulary_gets_more_bits_than_a_small_format_has(tiny: Path) -> None:
    with open_model(tiny) as model:
        assert uniform(model.spec, "q3h")["embedding"] == "q8"
        assert uniform(model.spec, "c3h")["head"] == "c6"
        assert uniform(model.spec, "r4")["head"] == "r6"
        assert uniform(model.spec, "c5")["head"] == "c5"
        assert uniform(model.spec, "bf16")["head"] == "bf16"


def test_a_recipe_is_followed_and_reproduced(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('default = "c4"\n[formats]\nembedding = "q8"\n"layers.0.v" = "q6"\n"layers.1.down" = "bf16"\n')
    result = compile_model(tiny, tmp_path / "a.llmc", recipe=path)
    assert result.formats["layers.0.v"] == "q6"
    assert result.formats["layers.1.down"] == "bf16"
    assert result.formats["layers.1.v"] == "c4"
    assert result.format == "mixed"
    path.write_text(recipe_text(result.formats))
    again = compile_model(tiny, tmp_path / "b.llmc", recipe=path)
    weights = [(r.path / "weights.safetensors").read_bytes() for r in (result, again)]
    assert weights[0] == weights[1]
    with llmc.load(result.path) as model:
        assert len(model.generate("hello", max_tokens=4, ignore_eos=True).ids) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[formats]\nnose = "q4"\n"layers.0.q" = "q9"\n', "no matrix 'nose'; no default.*; layers.0.q = 'q9'"),
        ('default = "q4"\nbits = 3\n', "unknown key 'bits'"),
        ('default = "keep"\n', "cannot be kept: the checkpoint stores F32"),
        ('default = "q4_k"\n', "embedding = 'q4_k', llmc knows"),
        ("default = ", "not TOML"),
        ("formats = 3\n", "formats is no table"),
    ],
)
def test_a_bad_recipe_is_refused_with_every_fault(text: str, message: str, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(LlmcError, match=message):
        compile_model(tiny, tmp_path / "a.llmc", recipe=path)
    assert not (tmp_path / "a.llmc").exists()


@pytest.mark.thorough_if(case=lambda bpw: bpw > 4)
@pytest.mark.parametrize("bpw", [3.6, 4.7])
def test_a_budget_is_kept_to_and_used(bpw: float, tiny: Path, tmp_path: Path) -> None:
    result = compile_model(tiny, tmp_path / "a.llmc", bpw=bpw)
    assert bpw - 0.5 < result.bits_per_weight <= bpw
    assert len(set(result.formats.values())) > 1
    assert result.loss is not None


@pytest.mark.thorough
def test_a_budget_in_bytes_counts_everything(tiny: Path, tmp_path: Path) -> None:
    result = compile_model(tiny, tmp_path / "a.llmc", size=60_000)
    assert 45_000 < _stored_bytes(result) <= 60_000


def test_a_budget_too_small_says_what_would_do(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match=r"--bpw 1 cannot be met: the smallest recipe is .* bits per weight"):
        compile_model(tiny, tmp_path / "a.llmc", bpw=1.0)
    assert not (tmp_path / "a.llmc").exists()


@pytest.mark.thorough
def test_calibration_is_deterministic_and_changes_the_weights(tiny: Path, text: Path, tmp_path: Path) -> None:
    made = [
        compile_model(tiny, tmp_path / f"{i}.llmc", quant="c3", calib=calib, seed=0)
        for i, calib in enumerate([text, text, None])
    ]
    weights = [(result.path / "weights.safetensors").read_bytes() for result in made]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    assert made[0].loss is not None


@pytest.mark.parametrize(
    ("content", "message"), [(b"short", "wanted at least"), (b"\xff\xfe\x00", "not UTF-8"), (None, "no such file")]
)
def test_a_bad_calibration_text_is_refused(content: bytes | None, message: str, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LlmcError, match=message):
        compile_model(tiny, tmp_path / "a.llmc", quant="c3", calib=path)


def test_the_loss_is_measured_and_written_down(tiny: Path, tmp_path: Path) -> None:
    fine, coarse = (
        compile_model(tiny, tmp_path / f"{quant}.llmc", quant=quant, check=True).loss for quant in ("q8", "q2")
    )
    assert fine is not None
    assert coarse is not None
    assert 0 < fine.kl < coarse.kl / 10
    assert not fine.large
    manifest = json.loads((tmp_path / "q8.llmc" / "manifest.json").read_text())
    assert manifest["quantization"]["loss"] == fine.as_dict()
    llmc.load(tmp_path / "q8.llmc").close()


def test_weights_that_a_check_read_are_not_hashed_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(integrity, "_SETTLED_NS", 0)
    for check in (True, False):
        compile_model(tiny, tmp_path / "a.llmc", quant="q8", check=check)
        seen: list[str] = []
        llmc.load(tmp_path / "a.llmc", progress=lambda stage, done, total, seen=seen: seen.append(stage)).close()
        assert ("verify weights" in seen) == (not check)
