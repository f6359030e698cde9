"""Keys turned in the cache of compiled models are those of the same tokens read at the other positions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler import kv_pages
from llmc.compiler.driver import compile_model
from llmc.runtime.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from latent_cases import EXPERTS, LATENT, YARN

pytestmark = pytest.mark.usefixtures("plain_code")

IDS = [(7 * i * i + 3) % 90 for i in range(40)]
PAGES = 3
# model_type, config, dtype of the cache, greatest error of a number about 1 in size
CASES: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "by halves": ("llama", {}, "f32", 1e-5),
    "q4": ("llama", {}, "q4", 0.15),
    "interleaved, a part of a head": ("gptj", {"rotary_dim": 8}, "f32", 1e-5),
    "a layer without rope": ("smollm3", {"no_rope_layers": [1, 0]}, "f32", 1e-5),
    "two ropes, windows": (
        "gemma3_text",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        "f32", 1e-5,
    ),
    "convolutions": ("lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1]}, "f32", 1e-5),
    "latent, magnified": (
        "deepseek_v3",
        {**LATENT, **EXPERTS, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}, "f32", 1e-5,
    ),
}  # fmt: skip


def _read(model: Model, position: int) -> list[int]:
    """The pages of the first group after IDS were read from `position` on."""
    sequence = model.runner.new_sequence()
    sequence.position = position
    model.runner.step([(sequence, IDS)])
    return list(sequence.pages)


@pytest.mark.parametrize("case", CASES)
def test_turned_keys(case: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model_type, config, kv, most = CASES[case]
    compile_model(tiny_model(model_type, **config), tmp_path / "a.llmc", quant="f32", kv=kv)
    with llmc.load(tmp_path / "a.llmc") as model:
        layout, group = model.runner.pool.groups, model.runner.pool.groups[0]
        assert model.manifest["functions"] == ["step", "turn"]
        assert group.window == 0
        here, there, wanted = _read(model, 3), _read(model, 80), _read(model, 80)
        other = [max(wanted) + 1 + n for n in range(PAGES)]
        model.runner.turn([77] * 16 * PAGES, here, other)
        model.runner.turn([-77] * 16 * PAGES, there, there)
        size, moved = model.manifest["kv"]["head_dim"], []
        for layer in range(sum(len(each.layers) for each in layout)):
            pool = model.runner.pool.layers[layer]
            if layer not in group.layers:
                assert not pool[other].any()
                continue
            before, back = (_tokens(pool[pages], kv, size) for pages in (here, there))
            copied, read = (_tokens(pool[pages], kv, size) for pages in (other, wanted))
            np.testing.assert_array_equal(copied[1], before[1])
            np.testing.assert_array_equal(back[1], read[1])
            np.testing.assert_allclose(copied, read, rtol=0, atol=most * np.abs(read).max())
            np.testing.assert_allclose(back, before, rtol=0, atol=most * np.abs(before).max())
            moved.append(np.abs(copied[0] - before[0]).max())
        assert max(moved) > 10 * most


def _tokens(pages: np.ndarray, kv: str, size: int) -> np.ndarray:
    """(2, tokens, G, D): K and V of IDS."""
    keys, values = kv_pages.KINDS[kv].load(pages, size)
    both = np.stack([keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)])
    return both.reshape(2, -1, *both.shape[3:])[:, : len(IDS)]
