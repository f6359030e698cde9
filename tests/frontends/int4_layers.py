"""AWQ and GPTQ checkpoints from scratch: slow loops that pack a number at a time, as those formats are described."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from folders import edit
from safetensors.numpy import load_file, save_file

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """A quantized linear layer as a quantizer thinks of it: codes (N, K), zeros and scales (N, groups)."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group: int

    def values(self) -> np.ndarray:
        """(N, K) float32, exact: a float16 times a whole number below 32."""
        rows, columns = self.codes.shape
        out = np.zeros((rows, columns), np.float32)
        for k in range(columns):
            g = k // self.group
            difference = self.codes[:, k].astype(np.float64) - self.zeros[:, g]
            out[:, k] = difference * self.scales[:, g].astype(np.float64)
        return out


def random_layer(rows: int, columns: int, group: int, zeros: tuple[int, int], seed: int = 0) -> Layer:
    """Zeros from zeros[0] to zeros[1]."""
    random = np.random.default_rng(seed)
    group = columns if group == -1 else group
    groups = -(-columns // group)
    scales = random.uniform(0.002, 0.02, (rows, groups)) * random.choice([-1, 1, 1, 1], (rows, groups))
    return Layer(
        random.integers(0, 16, (rows, columns)),
        random.integers(zeros[0], zeros[1] + 1, (rows, groups)),
        scales.astype(np.float16),
        group,
    )


def word(values: list[int]) -> int:
    """Eight 4-bit numbers, the first lowest, as a signed 32-bit word."""
    total = sum(int(value) << (4 * place) for place, value in enumerate(values))
    return total - (1 << 32) if total >= 1 << 31 else total


def pack_gptq(layer: Layer, less: int = 1) -> Arrays:
    """As AutoGPTQ's `pack` lays it out; `less` is taken from each zero: 1 in the first format."""
    rows, columns = layer.codes.shape
    groups = layer.scales.shape[1]
    qweight = np.zeros((columns // 8, rows), np.int32)
    for k in range(columns // 8):
        for n in range(rows):
            qweight[k, n] = word([layer.codes[n, 8 * k + i] for i in range(8)])
    qzeros = np.zeros((groups, rows // 8), np.int32)
    for g in range(groups):
        for n in range(rows // 8):
            qzeros[g, n] = word([layer.zeros[8 * n + i, g] - less for i in range(8)])
    g_idx = np.array([k // layer.group for k in range(columns)], np.int32)
    return {"qweight": qweight, "qzeros": qzeros, "scales": np.ascontiguousarray(layer.scales.T), "g_idx": g_idx}


def pack_awq(layer: Layer) -> Arrays:
    """As AutoAWQ's gemm lays it out: of eight rows, 0, 2, 4, 6 and then 1, 3, 5, 7."""
    rows, columns = layer.codes.shape
    groups = layer.scales.shape[1]
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight = np.zeros((columns, rows // 8), np.int32)
    qzeros = np.zeros((groups, rows // 8), np.int32)
    for n in range(rows // 8):
        for k in range(columns):
            qweight[k, n] = word([layer.codes[8 * n + i, k] for i in order])
        for g in range(groups):
            qzeros[g, n] = word([layer.zeros[8 * n + i, g] for i in order])
    return {"qweight": qweight, "qzeros": qzeros, "scales": np.ascontiguousarray(layer.scales.T)}


# name -> quantization_config, how a layer is packed, the range of its zeros.
PACKINGS: dict[str, tuple[dict[str, Any], Callable[[Layer], Arrays], tuple[int, int]]] = {
    "awq": ({"quant_method": "awq", "version": "gemm", "zero_point": True}, pack_awq, (0, 15)),
    "gptq": ({"quant_method": "gptq", "sym": False, "desc_act": False}, pack_gptq, (1, 15)),
    "gptq sym": (
        {"quant_method": "gptq", "sym": True, "desc_act": True, "checkpoint_format": "gptq", "damp_percent": 0.01},
        pack_gptq,
        (8, 8),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_v2", "meta": {"quantizer": ["x:1"]}},
        lambda layer: pack_gptq(layer, 0),
        (0, 15),
    ),
}


def kept_as(kind: str, format: str) -> str:
    """The format that keeps a layer, given the one for stored zeros: where all are 8, none needs to be stored."""
    return {"int4_b32": "q4_0", "int4_b64": "q4_0_b64"}[format] if kind == "gptq sym" else format


def config_of(kind: str, group: int) -> dict[str, Any]:
    return {**PACKINGS[kind][0], "bits": 4, "group_size": group}


def quantize_folder(source: Path, target: Path, kind: str, group: int) -> Path:
    """A copy with every linear layer but the head quantized to nearest, and `target`-float with the same values."""
    shutil.copytree(source, target)
    twin = Path(shutil.copytree(source, target.with_name(f"{target.name}-float")))
    tensors = load_file(source / "model.safetensors")
    quantized: Arrays = {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            quantized[name] = weight
            continue
        layer = nearest(weight, group, PACKINGS[kind][2])
        tensors[name] = layer.values()
        assert np.abs(tensors[name] - weight).max() < 0.2
        stem = name.removesuffix(".weight")
        quantized |= {f"{stem}.{part}": array for part, array in PACKINGS[kind][1](layer).items()}
    save_file(quantized, target / "model.safetensors")
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    edit(target / "config.json", quantization_config=config_of(kind, group))
    return target


def nearest(weight: np.ndarray, group: int, zeros: tuple[int, int]) -> Layer:
    """Round to nearest, zeros within bounds."""
    rows, columns = weight.shape
    group = columns if group == -1 else group
    blocks = weight.reshape(rows, -1, group)
    if zeros[0] == zeros[1]:
        scales = (np.abs(blocks).max(-1) / 7).astype(np.float16)
        zero = np.full(scales.shape, zeros[0])
    else:
        low, high = blocks.min(-1), blocks.max(-1)
        scales = ((high - low) / 15).astype(np.float16)
        zero = np.clip(np.rint(-low / scales), *zeros).astype(np.int64)
    codes = np.clip(np.rint(blocks / scales[..., None].astype(np.float32)) + zero[..., None], 0, 15)
    return Layer(codes.reshape(rows, columns).astype(np.int64), zero, scales, group)
