"""What quantization costs stays what docs/quality.md says: KL divergence to float32 on SmolLM2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import llmc

# Mean KL over 256 tokens of LICENSE, in nats: about one and a half times what was measured. "auto" keeps the file's own
# 4-bit grid; the others leave it.
BOUNDS = {"bf16": 0.0005, "q8": 0.012, "auto": 0.010, "c5": 0.15, "c3h": 1.0}


@pytest.mark.model
@pytest.mark.thorough_if(case=lambda quant: quant in ("bf16", "c5", "c3h"))
@pytest.mark.parametrize("quant", BOUNDS)
def test_a_format_costs_no_more_than_documented(quant: str, smollm2_artifact: Callable[..., Path], root: Path) -> None:
    text = (root / "LICENSE").read_text(encoding="utf-8")
    with llmc.load(smollm2_artifact(quant)) as model, llmc.load(smollm2_artifact("f32")) as original:
        found = model.evaluate(text, window=256, most_windows=1, against=original).figures()
    assert 0 < found["kl"] < BOUNDS[quant]
    assert abs(found["perplexity_ratio"] - 1) < 2 * found["kl"] + 0.02
