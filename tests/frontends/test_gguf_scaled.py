"""NVFP4 in GGUF files: blocks, and the numbers beside them that scale a matrix."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from llmc.compiler.errors import SourceError
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.gguf.scaled import with_scales
from llmc.frontends.source import open_model
from llmc.frontends.tensor import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from folders import refusal
from quantized_reading import check
from test_gguf_kept import kept_gguf, sized_blocks

__all__ = ["kept_gguf"]

NVFP4 = gguf.GGMLQuantizationType.NVFP4
FACTORS = {"q": 3.0, "v": 0.375, "output": 0.001}


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_scales_beside_matrices(kept_gguf: Callable[..., Path]) -> None:
    """Those of the layers that have one, and what is of activations beside it."""
    extra = {f"blk.0.attn_{name}.scale": floats(factor) for name, factor in FACTORS.items()}
    extra |= {f"blk.0.attn_{name}.input_scale": floats(7) for name in FACTORS}
    path = kept_gguf("NVFP4", extra)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_model(path) as source:
        found = {tensor.name: tensor for tensor in source.tensors.values()}
        for name in ("q", "k", "v", "output"):
            stored = f"blk.0.attn_{name}.weight"
            values = gguf.quants.dequantize(reader[stored].data, NVFP4) * np.float32(FACTORS.get(name, 1))
            whole = found[stored].read()
            np.testing.assert_array_equal(whole, values)
            np.testing.assert_array_equal(found[stored].read_rows(5, 9), whole[5:9])
            assert found[stored].kept == "nvfp4"
        exact = gguf.quants.dequantize(reader["blk.0.attn_q.weight"].data, NVFP4) * 3.0
        check(found["blk.0.attn_q.weight"], exact, "nvfp4")


def stack(path: Path, times: np.ndarray) -> dict[str, Tensor]:
    """Three experts' matrices of (4, 128), and numbers beside them."""
    blocks = sized_blocks("NVFP4", (12, 128), np.random.default_rng(2))
    path.write_bytes(blocks.tobytes() + times.tobytes())
    file, size = open_mapped(path, minimum=1), blocks.nbytes
    return {
        "e.weight": Tensor("e.weight", (3, 4, 128), "NVFP4", 0, size, file),
        "e.scale": Tensor("e.scale", times.shape, "F32", size, times.nbytes, file),
        "other.scale": Tensor("other.scale", times.shape, "F32", size, times.nbytes, file),
    }


def test_a_number_for_each_expert(tmp_path: Path) -> None:
    tensors = stack(tmp_path / "t", floats(1, 2, -0.5))
    found = with_scales(tensors)
    assert set(found) == {"e.weight", "other.scale"}
    plain = tensors["e.weight"].read()
    np.testing.assert_array_equal(found["e.weight"].read(), plain * floats(1, 2, -0.5)[:, None, None])
    np.testing.assert_array_equal(found["e.weight"].read_rows(1, 3), found["e.weight"].read()[1:3])


@pytest.mark.parametrize("count", [2, 4])
def test_numbers_for_other_experts(count: int, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"e.scale is F32 \[{count}\] for \[3, 4, 128\]"):
        with_scales(stack(tmp_path / "t", floats(*[1.0] * count)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number(bad: float, kept_gguf: Callable[..., Path]) -> None:
    with open_model(kept_gguf("NVFP4", {"blk.0.attn_q.scale": floats(bad)})) as source:
        tensor = next(one for one in source.tensors.values() if one.name == "blk.0.attn_q.weight")
        for read in (tensor.read, tensor.read_quantized):
            with pytest.raises(SourceError, match="NaN or infinite"):
                read()


def test_scales_of_what_has_none(kept_gguf: Callable[..., Path]) -> None:
    """Beside other types they are told of, not left out."""
    assert "blk.0.attn_q.scale" in refusal(kept_gguf("Q8_0", {"blk.0.attn_q.scale": floats(2)}))
