"""Which scales make rounding lose least, and what a compile makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import llmc
import llmc.targets.target as targets
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.equalize import LEAST, REACH, Factors, common, factors, for_groups
from llmc.compiler.driver.plan import scaled_groups
from llmc.compiler.driver.recipe import keep, uniform
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.formats import FORMATS
from llmc.frontends.source import open_model
from llmc.passes.quantize.equalize import Group

pytestmark = pytest.mark.usefixtures("plain_code")


class _Matrix:
    """A tensor as `factors` reads it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]


def _factors(weight: np.ndarray, square: np.ndarray, made_by: np.ndarray, strength: float = 1) -> dict[str, Factors]:
    model = SimpleNamespace(tensors={"w": _Matrix(weight)}, let_go=lambda: None)
    return factors(model, [Group(("w",), ("norm",), ("rows",), made_by)], {"w": square}, strength)


def _loss(weight: np.ndarray, square: np.ndarray, scales: np.ndarray) -> float:
    """What rounding puts a product off by, but for a constant: every scaled weight is off by as much."""
    return float((square / scales**2).sum() * ((weight * scales) ** 2).sum())


def test_no_scales_lose_less() -> None:
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(-1, 1, (2, 12)))
    weight = (random.standard_normal((40, 12)) * sizes[0]).astype(np.float32)
    square = (sizes[1] ** 2).astype(np.float32)
    best = _factors(weight, square, np.arange(12))["w"].columns
    assert best is not None
    least = _loss(weight, square, best)
    assert least < 0.8 * _loss(weight, square, np.ones(12))
    for _ in range(200):
        assert _loss(weight, square, best * np.exp(random.normal(0, 0.1, 12))) >= least


def test_columns_that_one_row_makes_are_scaled_alike() -> None:
    random = np.random.default_rng(1)
    weight, square = random.standard_normal((700, 8)).astype(np.float32), np.arange(1, 9, dtype=np.float32)
    made_by = np.array([0, 1, 0, 1, 2, 3, 2, 3])
    found = _factors(weight, square, made_by)
    columns, rows = found["w"].columns, found["norm"].rows
    assert columns is not None
    assert rows is not None
    assert found["rows"].rows is rows
    np.testing.assert_allclose(columns, 1 / rows[made_by], rtol=1e-6)
    half = _factors(weight, square, made_by, 0.5)["w"].columns
    assert half is not None
    np.testing.assert_allclose(half**2, columns, rtol=1e-5)


def test_columns_that_a_sample_does_not_use_are_not_given_up() -> None:
    weight, square = np.ones((4, 6), np.float32), np.array([0, 1, 1, 1, 1, 1e12], np.float32)
    columns = _factors(weight, square, np.arange(6))["w"].columns
    assert columns is not None
    assert columns[0] == pytest.approx(columns[1] * LEAST**0.5)
    assert columns[5] == REACH
    nothing = _factors(weight, np.zeros(6, np.float32), np.arange(6))["w"].columns
    np.testing.assert_array_equal(nothing, np.ones(6))


def test_taken_off_again() -> None:
    random = np.random.default_rng(2)
    values = random.standard_normal((5, 3)).astype(np.float32)
    given = Factors(np.array([1, 2, 4, 8, 16], np.float32), np.array([0.5, 1, 2], np.float32))
    np.testing.assert_array_equal(given.off(given.onto(values.copy())), values)
    np.testing.assert_array_equal(given.onto(values[2:4].copy(), 2), given.onto(values.copy())[2:4])


@pytest.fixture(scope="module")
def uneven(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose norms give some columns twenty times as much as others, as trained ones do."""
    source, folder = tiny_llama(seed=3), tmp_path_factory.mktemp("uneven")
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    random = np.random.default_rng(3)
    for name, values in weights.items():
        if "layernorm" in name:
            sizes = np.exp(random.uniform(-1.5, 1.5, values.shape)).astype(np.float32)
            weights[name] = values * sizes
            layer = name.rsplit(".", 2)[0]
            for reader in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") if "input" in name else (
                "mlp.gate_proj", "mlp.up_proj",
            ):  # fmt: skip
                weights[f"{layer}.{reader}.weight"] = weights[f"{layer}.{reader}.weight"] / sizes
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.thorough_if(case=lambda quant: quant != "r4")
@pytest.mark.parametrize("quant", ["q8", "c4", "r4"])
def test_a_compile_loses_less(quant: str, uneven: Path, tmp_path: Path) -> None:
    plain, scaled = (
        compile_model(uneven, tmp_path / f"{equalize}.llmc", quant=quant, check=True, equalize=equalize)
        for equalize in (False, True)
    )
    assert plain.loss is not None
    assert scaled.loss is not None
    assert scaled.loss.kl < 0.7 * plain.loss.kl
    said = [json.loads((made.path / "manifest.json").read_text())["quantization"] for made in (plain, scaled)]
    assert [each["equalized"] for each in said] == [False, True]
    assert plain.bytes == pytest.approx(scaled.bytes, abs=64)


@pytest.mark.thorough
def test_calibration_and_budgets_take_scales_too(uneven: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some text to read, of many words, one after another. " * 300, encoding="utf-8")
    plain, scaled = (
        compile_model(uneven, tmp_path / f"{equalize}.llmc", bpw=5, calib=text, equalize=equalize).loss
        for equalize in (False, True)
    )
    assert plain is not None
    assert scaled is not None
    assert scaled.kl < plain.kl


def test_without_check_nothing_is_compared(uneven: Path, tmp_path: Path) -> None:
    made = compile_model(uneven, tmp_path / "a.llmc", quant="c4", equalize=True)
    assert made.loss is None
    with llmc.load(made.path) as model:
        assert len(model.generate("hello", max_tokens=3, ignore_eos=True).ids) == 3


def _groups(model: Any, recipe: dict[str, str], **asked: Any) -> list[Group]:
    return scaled_groups(replace(Request("", Path()), **asked), (targets.native(),), model, recipe)


def test_only_what_is_rounded_is_scaled(tiny_llama: Callable[..., Path]) -> None:
    with open_model(tiny_llama()) as model:
        every = len(_groups(model, uniform(model.spec, "c4")))
        assert every == len(_groups(model, {})) == len(_groups(model, keep(model))) > 8
        assert not _groups(model, uniform(model.spec, "f32"))
        assert not _groups(model, uniform(model.spec, "bf16"))
        assert not _groups(model, uniform(model.spec, "q8"), activations="f32")  # what is left is hardly rounded
        assert len(_groups(model, uniform(model.spec, "c4"), activations="f32")) == every
        recipe = uniform(model.spec, "f32") | {"layers.1.down": "q8"}
        assert [group.matrices for group in _groups(model, recipe)] == [("layers.1.down",)]


@pytest.mark.model
def test_what_a_file_has_quantized_stays(smollm2_gguf: Path) -> None:
    with open_model(smollm2_gguf) as model:
        assert not _groups(model, keep(model))
        assert not _groups(model, {})
        assert not _groups(model, uniform(model.spec, "q4"))
        recipe = keep(model) | {f"layers.0.{name}": "c4" for name in ("q", "k", "v")}
        assert [group.matrices[0] for group in _groups(model, recipe)] == ["layers.0.q"]
        found = _groups(model, uniform(model.spec, "c4"))
        assert len(found) == 4 * model.spec.sizes.layers
        seen = {group.matrices[0]: np.ones(len(group.made_by), np.float32) for group in found}
        scaled = ModelSources(model, factors=factors(model, found, seen))
        assert not np.array_equal(scaled.read("layers.0.v"), ModelSources(model).read("layers.0.v"))


def test_what_texts_do_not_agree_on_does_not_count() -> None:
    random = np.random.default_rng(5)
    own = np.exp(random.normal(0, 1, 512))  # the model's
    texts = [{"w": (own * np.exp(random.normal(0, 0.2, 512))).astype(np.float32)} for _ in range(2)]
    agreed = np.log(common(texts)["w"])
    assert agreed.std() == pytest.approx(1, abs=0.1)
    chance = [{"w": np.exp(random.normal(3, 1, 512)).astype(np.float32)} for _ in range(2)]
    assert np.log(common(chance)["w"]).std() < 0.15
    assert not common([{"w": np.full(3, np.inf, np.float32)}, texts[0]])  # what overflows is left alone
    alike = common([{"w": np.full(9, 4, np.float32)}] * 2)["w"]
    np.testing.assert_allclose(alike, 4, rtol=1e-6)


def test_experts_are_scaled_by_what_their_router_reads() -> None:
    groups = [Group(("router", "experts.gate"), ("norm",), (), np.arange(2))]
    square = np.array([1, 2], np.float32)
    assert for_groups({"router": square, "o": square}, groups)["experts.gate"] is square
    assert not for_groups({}, groups)


def test_errors_of_columns_count_by_what_they_are_multiplied_with(tiny_llama: Callable[..., Path]) -> None:
    random = np.random.default_rng(6)
    with open_model(tiny_llama()) as model:
        columns = model.tensors["layers.0.q"].shape[1]
        square = np.exp(random.normal(0, 2, columns)).astype(np.float32)
        squares = dict.fromkeys(("layers.0.q", "layers.0.k", "layers.0.v"), square)
        scaled = {name: Factors(None, np.full(columns, 2, np.float32)) for name in squares}
        weighed = ModelSources(model, squares=squares)
        names, weight = tuple(squares), weighed.stacked(tuple(squares))

        def loss(source: ModelSources) -> float:
            back = FORMATS["c4"].unpack(source.pack("c4", names), *weight.shape)
            return float(((source.unscaled(names, back) - weight) ** 2 * square).sum())

        alike = loss(ModelSources(model))
        assert loss(weighed) < 0.8 * alike
        assert loss(ModelSources(model, squares=squares, factors=scaled)) < 0.8 * alike
