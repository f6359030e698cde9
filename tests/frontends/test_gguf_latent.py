"""Latent attention in GGUF files: sizes under old and new keys, scaled rope, what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import Latent, ModelSpec, Scaling

sys.path.insert(0, str(Path(__file__).parent))
from test_gguf_spec import derive

ABSORBED = {
    "attention__head_count_kv": 1, "attention__key_length": 40, "attention__value_length": 32,
    "attention__key_length_mla": 24, "attention__value_length_mla": 48,
}  # fmt: skip
YARN = {
    "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16,
    "rope__scaling__yarn_log_multiplier": 0.07,
}  # fmt: skip


def deepseek(**changes: Any) -> ModelSpec:
    return derive("deepseek2", **changes)


def test_both_ways_to_say_the_sizes_say_the_same() -> None:
    spec = deepseek()
    assert spec.latent == Latent(q_rank=0, kv_rank=32, plain_dim=16, rope_dim=8, value_dim=48)
    assert (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim) == (4, 4, 24)
    assert deepseek(**ABSORBED) == spec
    assert deepseek(attention__q_lora_rank=12).latent.q_rank == 12


def test_scaled_rope_makes_scores_grow() -> None:
    spec = deepseek(**YARN)
    assert spec.scaling == Scaling("yarn", 4.0, 16, low=1.0, high=32.0)
    assert spec.position.factor == 1
    assert spec.attention.scale == pytest.approx((1 + 0.07 * math.log(4)) ** 2 / math.sqrt(24))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__head_count_kv": 2}, "attention.head_count_kv = 2, wanted 1 or attention.head_count = 4"),
        ({"attention__kv_lora_rank": 0.5}, "attention.kv_lora_rank = 0.5, wanted a whole number"),
        ({"attention__key_length": 20}, "attention.key_length - rope.dimension_count = 12, wanted a whole number"),
        ({"rope__dimension_count": True}, "rope.dimension_count = True, wanted"),
        ({"rope__scaling__type": "yarn"}, "rope.scaling.type = 'yarn', but scaling.factor is not said"),
        ({**YARN, "rope__scaling__yarn_log_multiplier": "x"}, "yarn_log_multiplier = 'x', wanted a number from 0"),
        ({**YARN, "rope__scaling__factor": math.nan}, "rope.scaling.factor = nan, wanted a number"),
        ({"rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope', llmc knows"),
        ({"attention__indexer__top_k": 3}, "unknown keys deepseek2.'attention.indexer.top_k'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmcError) as caught:
        deepseek(**changes)
    assert message in str(caught.value)
