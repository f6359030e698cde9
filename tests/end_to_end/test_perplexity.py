"""The perplexity that `Model.evaluate` reports is that of transformers on the same weights and windows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmc
from llmc.runtime.quality import windows

sys.path.insert(0, str(Path(__file__).parent))
from reference import logits, reference


@pytest.mark.model
def test_perplexity_is_that_of_transformers(
    smollm2_artifact: Callable[..., Path], smollm2_gguf: Path, root: Path
) -> None:
    text = (root / "LICENSE").read_text(encoding="utf-8")
    with llmc.load(smollm2_artifact("f32")) as model:
        found = model.evaluate(text, most_windows=2)
        rows = windows(model.encode(text), 512)[:2]
    twin = reference(smollm2_gguf)
    nll = []
    for ids in rows:
        scores = logits(twin, ids.tolist()).astype(np.float64)[:-1]
        scores -= scores.max(-1, keepdims=True)
        nll.append(np.log(np.exp(scores).sum(-1)) - scores[np.arange(511), ids[1:]])
    expected = np.exp(np.concatenate(nll).mean())
    assert found.tokens == 1022
    assert found.perplexity == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(found.nll, np.concatenate(nll), atol=2e-3)
