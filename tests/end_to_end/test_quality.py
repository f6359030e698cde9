"""What quantization costs stays what docs/measured.md says: KL divergence to float32 on SmolLM2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "bench")]

from prompts import PROMPTS
from quality import all_logits, kl_divergence, log_softmax

import llmc

# Mean KL over the prompts, in nats: about twice what was measured.
BOUNDS = {"bf16": 0.0005, "q8": 0.012, "q4": 0.010}


@pytest.fixture(scope="module")
def texts(smollm2_artifact: Callable[..., Path]) -> list[list[int]]:
    with llmc.load(smollm2_artifact("f32")) as model:
        return [list(model.encode(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2_artifact: Callable[..., Path], texts: list[list[int]]) -> np.ndarray:
    return log_softmax(all_logits(smollm2_artifact("f32"), texts))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("quant", BOUNDS)
def test_a_format_costs_no_more_than_documented(
    quant: str, smollm2_artifact: Callable[..., Path], texts: list[list[int]], expected: np.ndarray
) -> None:
    kl = kl_divergence(expected, log_softmax(all_logits(smollm2_artifact(quant), texts)))
    assert 0 < kl.mean() < BOUNDS[quant]
