"""Compiled models over pages of codes: near float32 pages, the same bits however they are fed, pages copied whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.engine import Feed

IDS = [(7 * i * i + 3) % 90 for i in range(40)]


@pytest.mark.parametrize(("kv", "most"), [("q8", 0.02), ("q4", 0.2)])
def test_logits_are_near_and_chunks_change_nothing(
    kv: str, most: float, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    exact = compile_model(tiny_llama(), tmp_path / "f32.llmc", quant="f32", kv="f32").path
    coded = compile_model(tiny_llama(), tmp_path / f"{kv}.llmc", quant="f32", kv=kv).path
    with llmc.load(exact) as model:
        wanted = model.engine.step([Feed(model.engine.new_sequence(), IDS, "all")]).logits
    with llmc.load(coded) as model:
        engine = model.engine
        got = engine.step([Feed(engine.new_sequence(), IDS, "all")]).logits
        sequence = engine.new_sequence()
        rows = [engine.step([Feed(sequence, [token], "all")]).logits for token in IDS]
        np.testing.assert_array_equal(np.concatenate(rows), got)
        assert 0 < np.abs(got - wanted).max() < most * np.abs(wanted).max()


@pytest.mark.parametrize("kv", ["q8", "q4"])
def test_a_page_copied_whole_is_the_same_page(kv: str, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    path = compile_model(tiny_llama(), tmp_path / "a.llmc", kv=kv).path
    with llmc.load(path) as model:
        engine = model.engine
        first, second = engine.new_sequence(), engine.new_sequence()
        engine.step([(first, IDS[:32])])
        engine.pool.reserve_all([(second, 32)])
        for layer in engine.pool.layers:
            layer[list(second.pages)] = layer[list(first.pages)]
        second.length = first.length
        a, b = (engine.step([(sequence, IDS[32:])]).logits for sequence in (first, second))
        np.testing.assert_array_equal(a, b)
