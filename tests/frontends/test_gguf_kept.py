"""A GGUF kept as it is computes what its dequantized weights do in transformers, for every block type.

That a type's numbers are kept bit for bit is test_gguf_blocks.py's, that a format's kernels are exact tests/targets'.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.runner import Feed

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
sys.path.insert(0, str(Path(__file__).parent))
from reference import logits, reference
from test_gguf_blocks import QUANTIZABLE, TYPES, spread_scale

pytestmark = pytest.mark.usefixtures("plain_code")

HIDDEN, FFN, VOCAB = 256, 256, 264
EXACT = ("Q4_K",)  # every table that a block can have; kernels without int8 take long to compile
IDS = [1, 17, 200, 45, 45, 9, 130, 77, 12, 3, 250, 61]


def _shapes() -> dict[str, tuple[int, int]]:
    shapes = {"token_embd.weight": (VOCAB, HIDDEN)}
    for layer in range(2):
        block = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def sized_blocks(stored: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Bytes of blocks: by gguf's quantizer where it has one, else random codes under sensible scales."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType[stored]
    if stored in QUANTIZABLE:
        values = rng.standard_normal(shape).astype(np.float32) * np.float32(shape[1] ** -0.5)
        return np.asarray(quants.quantize(values, kind))
    per_block, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // per_block, size), np.uint8)
    if stored == "MXFP4":
        raw[:, :, 0] = 121
        return raw.reshape(shape[0], -1)
    if stored == "NVFP4":
        raw[:, :, :4] = rng.integers(2, 12, (*raw.shape[:2], 4))
        return raw.reshape(shape[0], -1)
    _set_scales(raw, stored, np.float16(1e-3))
    values = quants.dequantize(raw.reshape(shape[0], -1), kind)
    _set_scales(raw, stored, np.float16(1e-3 * shape[1] ** -0.5 / values.std()))
    return raw.reshape(shape[0], -1)


def _set_scales(raw: np.ndarray, stored: str, scale: np.float16) -> None:
    if stored == "IQ1_M":
        spread_scale(raw, np.full(raw.shape[:2], scale))
    for at in TYPES[stored][1]:
        raw[:, :, at : at + 2] = np.full((*raw.shape[:2], 1), scale).view(np.uint8)


@pytest.fixture
def kept_gguf(tiny_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """A function `type, more tensors -> file`: two layers of 256 channels, every matrix of that type."""

    def write(stored: str, more: Mapping[str, np.ndarray] | None = None) -> Path:
        rng = np.random.default_rng(len(stored))
        tensors: dict[str, Any] = {name: sized_blocks(stored, shape, rng) for name, shape in _shapes().items()}
        norms = ["output_norm", *(f"blk.{i}.{name}_norm" for i in range(2) for name in ("attn", "ffn"))]
        tensors |= {f"{name}.weight": 1 + 0.1 * rng.standard_normal(HIDDEN).astype(np.float32) for name in norms}
        keys = {
            "llama.embedding_length": np.uint32(HIDDEN), "llama.feed_forward_length": np.uint32(FFN),
        }  # fmt: skip
        return tiny_gguf(keys=keys, tensors=tensors | dict(more or {}), quant=stored)

    return write


def _logits(artifact: Path) -> np.ndarray:
    with llmc.load(artifact) as model:
        return model.runner.step([Feed(model.runner.new_sequence(), IDS, "all")]).logits.copy()


@pytest.mark.thorough_if(case=lambda stored: stored != "Q4_K")
@pytest.mark.parametrize("stored", TYPES)
def test_kept_weights_give_the_logits_of_float32(stored: str, kept_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    path = kept_gguf(stored)
    expected = logits(reference(path), IDS)
    kept = compile_model(path, tmp_path / "kept.llmc", kv="f32")
    assert set(kept.formats.values()) == {TYPES[stored][0]}
    size = np.linalg.norm(expected)
    assert np.linalg.norm(_logits(kept.path) - expected) < 3e-2 * size  # int8 activations: 0.5 % a matrix
    if stored in EXACT:
        exact = compile_model(path, tmp_path / "exact.llmc", kv="f32", activations="f32")
        assert np.linalg.norm(_logits(exact.path) - expected) < 1e-5 * size
