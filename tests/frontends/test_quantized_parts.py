"""Tensors of quantized layers that may be anything: they are read, as finite numbers, or refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import block_format, dequantize
from llmc.frontends.quantized.folded_tensor import FoldedTensor

sys.path.insert(0, str(Path(__file__).parent))
from quantized_layers import (
    bnb_eight,
    bnb_four,
    compressed_bytes,
    compressed_fp4,
    compressed_ints,
    gptq,
    mlx_affine,
    mlx_floats,
)
from quantized_reading import fold


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    groups = {"g": {"weights": {"num_bits": 4, "type": "int", **weights}}}
    table = {"quant_method": "compressed-tensors", "format": f"{format}-quantized", "config_groups": groups}
    return {"quantization_config": table}


# config.json, and a layer that it describes
LAYERS = {
    "mlx": ({"quantization": {"bits": 5, "group_size": 32}}, mlx_affine(4, 64, 5, 32)),
    "mlx mxfp4": ({"quantization": {"mode": "mxfp4"}}, mlx_floats(4, 64, "mxfp4")),
    "mlx nvfp4": ({"quantization": {"mode": "nvfp4"}}, mlx_floats(4, 64, "nvfp4")),
    "mlx mxfp8": ({"quantization": {"mode": "mxfp8"}}, mlx_floats(4, 64, "mxfp8")),
    "packed": (compressed("pack", group_size=32), compressed_ints(4, 64, 4, 32)),
    "packed whole": (compressed("pack"), compressed_ints(4, 64, 4, None)),
    "packed zeros": (compressed("pack", group_size=32, symmetric=False), compressed_ints(4, 64, 4, 32, zeros=True)),
    "int": (compressed("int", num_bits=8, group_size=-1), compressed_bytes(4, 64, "int", (1, 64))),
    "float": (compressed("float", num_bits=8, type="float", group_size=-1), compressed_bytes(4, 64, "float", (1, 64))),
    "mxfp4": (compressed("mxfp4-pack", type="float", group_size=32), compressed_fp4(4, 64, "mxfp4")),
    "nvfp4": (compressed("nvfp4-pack", type="float", group_size=16), compressed_fp4(4, 64, "nvfp4")),
    "bnb 4": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
              bnb_four(4, 64, "nf4", 64, 2)),
    "bnb 8": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, bnb_eight(4, 64)),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 2, "group_size": 32}},
             gptq(16, 64, 2, 32, (1, 3))),
}  # fmt: skip
SHAPES = [
    (),
    (0,),
    (1,),
    (2,),
    (4,),
    (64,),
    (4, 1),
    (1, 4),
    (4, 2),
    (0, 2),
    (4, 0),
    (4, 64),
    (1, 1),
    (2, 4, 2),
    (1,) * 5,
]
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8, torch.uint32]
NAMES = [
    "weight", "scales", "biases", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "SCB", "weight_format", "g_idx",
]  # fmt: skip


def changed(draw: Any, part: torch.Tensor) -> torch.Tensor:
    """The part in another shape, of another type, or with other bytes."""
    how = draw(st.sampled_from(["shape", "cut", "type", "bytes", "new"]))
    if how == "shape":
        shapes = [(-1,), (1, -1), (-1, 1), (*part.shape, 1), part.shape[::-1]]
        return part.reshape(draw(st.sampled_from(shapes)))
    if how == "cut" and part.dim():
        return part[: draw(st.integers(0, len(part)))].clone()
    if how == "type":
        return part.to(draw(st.sampled_from(TYPES)))
    if how == "bytes":
        random = np.random.default_rng(draw(st.integers(0, 99)))
        raw = torch.from_numpy(random.integers(0, 256, (1, part.nbytes), np.uint8))
        return raw.view(part.dtype).reshape(part.shape) if part.numel() else part
    return torch.zeros(draw(st.sampled_from(SHAPES)), dtype=draw(st.sampled_from(TYPES)))


@pytest.mark.parametrize("kind", LAYERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_parts(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    config, packed = LAYERS[kind]
    parts: dict[str, Any] = dict(packed.tensors)
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from([*parts, *parts, *NAMES]))
        if name in parts and data.draw(st.integers(0, 9)) > 0:
            parts[name] = changed(data.draw, parts[name])
        elif name in parts:
            del parts[name]
        else:
            parts[name] = changed(data.draw, torch.ones(4))
    tensors = {f"m.mlp.switch_mlp.up_proj.{name}": part for name, part in parts.items()}
    path = tmp_path_factory.mktemp("t") / "t"
    found = unless_refused(lambda: fold(path, config, tensors | {"n": torch.ones(1)})) or {}
    for tensor in found.values():
        if not isinstance(tensor, FoldedTensor):
            continue
        for read in (tensor.read, partial(tensor.read_rows, 0, tensor.shape[0] // 2), partial(kept, tensor)):
            values = unless_refused(read)
            assert values is None or (values.dtype == np.float32 and np.isfinite(values).all())


def unless_refused(do: Callable[[], Any]) -> Any:
    """What is done; None where it is refused."""
    try:
        return do()
    except LlmcError as error:
        message = str(error)
    assert "\n" not in message
    return None


def kept(tensor: FoldedTensor) -> np.ndarray | None:
    """The values of the format that keeps the codes."""
    if not tensor.kept:
        return None
    format = block_format(tensor.kept)
    return dequantize(format, tensor.read_quantized())
