"""Compiled models over pages that are shared, copied, given back and swapped: the same bits as alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.cache.prefix_tree import PrefixTree
from llmc.runtime.cache.swap import put_back, swap_out
from llmc.runtime.runner import Feed, Runner

IDS = [(7 * i * i + 3) % 90 for i in range(100)]
# Kind of window -> model_type, its config, format of the pages.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "none": ("llama", {}, "q4"),
    "all layers": ("mistral", {"sliding_window": 20}, "bf16"),
    "some layers": (
        "gemma3_text",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        "q8",
    ),
    "some layers, beside convolutions": (
        "lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": 20,
        },
        "bf16",
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: Any) -> Runner:
    """The runner of one of MODELS."""
    model_type, config, kv = MODELS[request.param]
    target = tmp_path_factory.mktemp("cache") / "tiny.llmc"
    path = compile_model(tiny_model(model_type, **config), target, quant="f32", kv=kv).path
    return llmc.load(path, cache_tokens=640).runner


def alone(runner: Runner, ids: list[int]) -> NDArray[np.float32]:
    """Logits (N, V) of a text read in one step."""
    sequence = runner.new_sequence()
    logits = runner.step([Feed(sequence, ids, "all")]).logits
    runner.release(sequence)
    return logits


def spoil(runner: Runner) -> None:
    """Put other numbers, those of a page in use, into all pages that nobody holds."""
    for group, ledger in zip(runner.pool.groups, runner.pool.ledgers, strict=True):
        for layer in group.layers:
            pages = runner.pool.layers[layer]
            pages[ledger.holders == 0] = pages[int(np.flatnonzero(ledger.holders)[0])]


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_pages_behind_windows_are_not_read(runner: Runner, rows: int) -> None:
    pool, sequence = runner.pool, runner.new_sequence()
    found = []
    for start in range(0, 100, rows):
        found.append(runner.step([Feed(sequence, IDS[start : start + rows], "all")]).logits)
        pool.check([sequence])
        spoil(runner)
    for group, ledger in zip(pool.groups, pool.ledgers, strict=True):
        assert pool.num_pages - ledger.free <= (3 + rows // 16 if group.window else 7)
    runner.release(sequence)
    np.testing.assert_array_equal(np.concatenate(found), alone(runner, IDS))


def test_forks_go_their_own_ways(runner: Runner) -> None:
    first = runner.new_sequence()
    runner.step([(first, IDS[:41])])
    twin = runner.fork(first)
    texts = {first: list(IDS[:41]), twin: list(IDS[:41])}
    for step in range(20):
        feeds = {sequence: (IDS[60 + step] + turn) % 90 for turn, sequence in enumerate(texts)}
        output = runner.step([(sequence, [token]) for sequence, token in feeds.items()])
        for sequence, token in feeds.items():
            texts[sequence].append(token)
        runner.pool.check([first, twin])
    for row, (sequence, ids) in enumerate(texts.items()):
        np.testing.assert_array_equal(output.logits[row], alone(runner, ids)[-1])
        runner.release(sequence)
    assert runner.pool.free_pages == runner.pool.num_pages


def test_a_text_is_cut_back_and_read_on(runner: Runner) -> None:
    sequence = runner.new_sequence()
    runner.step([(sequence, IDS[:50])])
    left = runner.truncate(sequence, 37)
    other = [*IDS[:37], *IDS[70:90]]
    logits = runner.step([(sequence, other[left:])]).logits
    np.testing.assert_array_equal(logits[0], alone(runner, other)[-1])
    runner.release(sequence)


def test_a_shared_beginning_and_a_swap_change_nothing(runner: Runner) -> None:
    pool, tree = runner.pool, PrefixTree(runner.pool)
    first = runner.new_sequence()
    for start in (0, 32, 64):
        runner.step([(first, IDS[start : start + 32])])
        tree.insert(first, IDS[: start + 32])
    other = [*IDS[:70], *IDS[:25]]
    second = tree.match(other)
    assert second.length == 64
    runner.step([(second, other[64:80])])
    away = swap_out(pool, second)
    pool.check([first, tree])
    runner.release(first)
    tree.clear()
    filler = runner.new_sequence()
    runner.step([(filler, IDS)])
    put_back(pool, second, away)
    np.testing.assert_array_equal(runner.step([Feed(second, other[80:], "all")]).logits, alone(runner, other)[80:])
    for sequence in (second, filler):
        runner.release(sequence)
    assert pool.free_pages == pool.num_pages
