"""Compiled models over pages of codes: near float32 pages, the same bits however they are fed, pages copied whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.runner import Feed

pytestmark = pytest.mark.usefixtures("plain_code")

IDS = [(7 * i * i + 3) % 90 for i in range(40)]


@pytest.mark.parametrize(("kv", "most"), [("q8", 0.02), ("q4", 0.2)])
def test_logits_are_near_and_chunks_change_nothing(
    kv: str, most: float, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    exact = compile_model(tiny_llama(), tmp_path / "f32.llmc", quant="f32", kv="f32").path
    coded = compile_model(tiny_llama(), tmp_path / f"{kv}.llmc", quant="f32", kv=kv).path
    with llmc.load(exact) as model:
        wanted = model.runner.step([Feed(model.runner.new_sequence(), IDS, "all")]).logits
    with llmc.load(coded) as model:
        runner = model.runner
        got = runner.step([Feed(runner.new_sequence(), IDS, "all")]).logits
        sequence = runner.new_sequence()
        rows = [runner.step([Feed(sequence, [token], "all")]).logits for token in IDS]
        np.testing.assert_array_equal(np.concatenate(rows), got)
        assert 0 < np.abs(got - wanted).max() < most * np.abs(wanted).max()


@pytest.mark.parametrize("kv", ["q8", "q4"])
@pytest.mark.thorough_if(case=lambda kv: kv == "q8")
def test_a_page_copied_whole_is_the_same_page(kv: str, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    path = compile_model(tiny_llama(), tmp_path / "a.llmc", kv=kv).path
    with llmc.load(path) as model:
        runner = model.runner
        first, second = runner.new_sequence(), runner.new_sequence()
        runner.step([(first, IDS[:32])])
        runner.pool.reserve_all([(second, 32)])
        for layer in runner.pool.layers:
            layer[list(second.pages)] = layer[list(first.pages)]
        second.length = second.position = first.length
        a, b = (runner.step([(sequence, IDS[32:])]).logits for sequence in (first, second))
        np.testing.assert_array_equal(a, b)
