"""Matrices as quantizers of other makers save them: slow loops that pack a number at a time.

Codes are random, and so are the numbers they stand for: about as large as a model's weights are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

SPREAD = 0.2  # from the least value to the greatest, about

# https://arxiv.org/abs/2305.14314 appendix E; and what bitsandbytes says of its FP4 (csrc, dequantize of fp4).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
MAPS = {"nf4": NF4, "fp4": (*_FP4, *(-value for value in _FP4))}


@dataclass(frozen=True)
class Packed:
    """The tensors that stand for a matrix, by what follows its layer's name, and its numbers (N, K) as float64."""

    tensors: dict[str, torch.Tensor]
    values: np.ndarray

    def named(self, layer: str) -> dict[str, torch.Tensor]:
        return {f"{layer}.{part}": tensor for part, tensor in self.tensors.items()}


def words(numbers: Iterable[int], bits: int) -> list[int]:
    """Numbers of so many bits, one behind another, the first lowest, cut into words of 32 bits."""
    whole, count = 0, 0
    for number in numbers:
        assert 0 <= number < 1 << bits
        whole |= int(number) << (bits * count)
        count += 1
    return [whole >> (32 * at) & 0xFFFFFFFF for at in range(-(-bits * count // 32))]


def word_rows(rows: np.ndarray, bits: int, kind: type = np.uint32) -> torch.Tensor:
    """The numbers of each row in words."""
    return torch.from_numpy(np.array([words(row, bits) for row in rows], np.uint32).view(kind))


def pairs(rows: np.ndarray) -> torch.Tensor:
    """Two numbers of 4 bits in a byte, the first in the lower half."""
    made = [[int(row[k]) + 16 * int(row[k + 1]) for k in range(0, len(row), 2)] for row in rows]
    return torch.tensor(made, dtype=torch.uint8)


def floats(values: np.ndarray, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """As they are stored, and what is stored."""
    stored = torch.from_numpy(np.asarray(values, np.float32)).to(dtype)
    return stored, stored.double().numpy()


def numbers(rows: int, columns: int, one: Callable[[int, int], float]) -> np.ndarray:
    """`one(n, k)` of every row and column."""
    out = np.zeros((rows, columns))
    for n in range(rows):
        for k in range(columns):
            out[n, k] = one(n, k)
    return out


def e2m1(code: int) -> float:
    """A sign, two bits of exponent of bias 1, one of fraction: OCP MX 1.0, section 5.3.3."""
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -size if code & 8 else size


@cache
def e4m3(code: int) -> float:
    return float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).float())


# --- MLX -----------------------------------------------------------------------------------------


def mlx_affine(
    rows: int, columns: int, bits: int, group: int, seed: int = 0, dtype: torch.dtype = torch.float16
) -> Packed:
    """w = scale * code + bias."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (rows, columns))
    wide = random.uniform(0.5, 1, (rows, columns // group)) * random.choice([-1, 1], (rows, columns // group))
    scales, s = floats(wide * SPREAD / (1 << bits), dtype)
    biases, b = floats(-s * (1 << bits) * random.uniform(0.4, 0.6, s.shape), dtype)
    values = numbers(rows, columns, lambda n, k: s[n, k // group] * codes[n, k] + b[n, k // group])
    return Packed({"weight": word_rows(codes, bits), "scales": scales, "biases": biases}, values)


def mlx_floats(rows: int, columns: int, mode: str, seed: int = 0) -> Packed:
    """ "mxfp4", "nvfp4" or "mxfp8"."""
    random = np.random.default_rng(seed)
    bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
    codes = random.integers(0, 1 << bits, (rows, columns))
    codes[(codes & 127) == 127] = 0  # of 8 bits, no number
    value = e2m1 if bits == 4 else e4m3
    if mode == "nvfp4":
        scales = random.integers(8, 24, (rows, columns // group))
        scale = e4m3
    else:
        scales = random.integers(119, 122, (rows, columns // group)) - (6 if mode == "mxfp8" else 0)
        scale = _power
    values = numbers(rows, columns, lambda n, k: value(int(codes[n, k])) * scale(int(scales[n, k // group])))
    return Packed({"weight": word_rows(codes, bits), "scales": torch.from_numpy(scales.astype(np.uint8))}, values)


def _power(code: int) -> float:
    return 2.0 ** (code - 127)


# --- compressed-tensors --------------------------------------------------------------------------


def compressed_ints(
    rows: int, columns: int, bits: int, group: int | None, zeros: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Packed:  # fmt: skip
    """ "pack-quantized"; `group`: columns that share a scale, -1 for all of a row, None for all of the matrix."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (rows, columns))
    wide = columns if group in (None, -1) else group
    groups = 1 if wide is None else -(-columns // wide)
    shape = (1,) if group is None else (rows, groups)
    scales, s = floats(random.uniform(0.5, 1, shape) * SPREAD / (1 << bits), dtype)
    s = np.broadcast_to(s.reshape(-1, groups), (rows, groups))
    middle = 1 << (bits - 1)
    zero = random.integers(0, 1 << bits, (rows, groups)) if zeros else np.full((rows, groups), middle)
    values = numbers(rows, columns, lambda n, k: s[n, k // wide] * (codes[n, k] - zero[n, k // wide]))
    tensors = {
        "weight_packed": word_rows(codes, bits, np.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if zeros:  # words along the rows
        tensors["weight_zero_point"] = word_rows(zero.T, bits, np.int32).T.contiguous()
    return Packed(tensors, values)


def compressed_bytes(rows: int, columns: int, kind: str, sides: tuple[int, int], shape: Sequence[int] = (),
                     seed: int = 0) -> Packed:  # fmt: skip
    """ "int" or "float" of 8 bits; `sides`: rows and columns that share a scale; `shape`: of the scales, if another."""
    random = np.random.default_rng(seed)
    high, wide = sides
    scales = random.uniform(0.5, 1, (-(-rows // high), -(-columns // wide))) * SPREAD / (256 if kind == "int" else 512)
    stored, s = floats(scales, torch.float32 if kind == "float" else torch.bfloat16)
    if kind == "int":
        signed = random.integers(-128, 128, (rows, columns))
        weight = torch.from_numpy(signed.astype(np.int8))
        values = numbers(rows, columns, lambda n, k: s[n // high, k // wide] * signed[n, k])
    else:
        codes = random.integers(0, 256, (rows, columns))
        codes[(codes & 127) == 127] = 0
        weight = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
        values = numbers(rows, columns, lambda n, k: s[n // high, k // wide] * e4m3(int(codes[n, k])))
    return Packed({"weight": weight, "weight_scale": stored.reshape(*shape) if shape else stored}, values)


def compressed_fp4(rows: int, columns: int, kind: str, whole: float = 1.0, seed: int = 0) -> Packed:
    """ "mxfp4" or "nvfp4", whose scales are divided by `whole`."""
    packed = mlx_floats(rows, columns, kind, seed)
    codes = packed.tensors["weight"].numpy().view(np.uint8)
    nibbles = np.stack([codes % 16, codes // 16], -1).reshape(rows, columns)
    scales = packed.tensors["scales"]
    tensors = {"weight_packed": pairs(nibbles), "weight_scale": scales}
    if kind == "nvfp4":
        tensors["weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.tensor([whole], dtype=torch.float32)
    return Packed(tensors, packed.values / float(np.float32(whole)))


# --- Model Optimizer ------------------------------------------------------------------------------


def modelopt_floats(rows: int, columns: int, sides: tuple[int, int], shape: Sequence[int], seed: int = 0) -> Packed:
    """E4M3; `sides`: rows and columns that share a scale; `shape`: of the scales."""
    packed = compressed_bytes(rows, columns, "float", sides, seed=seed)
    scales = packed.tensors["weight_scale"]
    return Packed(
        packed.tensors | {"weight_scale": scales if shape is None else scales.reshape(tuple(shape))}, packed.values
    )


def modelopt_powers(rows: int, columns: int, seed: int = 0) -> Packed:
    """E4M3 and powers of 2."""
    packed = mlx_floats(rows, columns, "mxfp8", seed)
    codes = packed.tensors["weight"].view(torch.uint8).reshape(rows, columns).view(torch.float8_e4m3fn)
    return Packed({"weight": codes, "weight_scale": packed.tensors["scales"]}, packed.values)


def modelopt_fp4(rows: int, columns: int, kind: str, whole: float = 1.0, seed: int = 0) -> Packed:
    """ "mxfp4", or "nvfp4" whose scales are multiplied by `whole`."""
    packed = compressed_fp4(rows, columns, kind, 1.0, seed)
    tensors = {"weight": packed.tensors["weight_packed"], "weight_scale": packed.tensors["weight_scale"]}
    if kind == "nvfp4":
        tensors["weight_scale_2"] = torch.tensor(whole, dtype=torch.float32)
    return Packed(tensors, packed.values * float(np.float32(whole)))


# --- bitsandbytes --------------------------------------------------------------------------------


def bnb_four(rows: int, columns: int, kind: str, block: int = 64, nested: int = 0, seed: int = 0) -> Packed:
    """ "nf4" or "fp4"; `nested`: scales that share one, where they are bytes themselves.

    Its values are rounded as bitsandbytes rounds them, to float32 after every step.
    """
    random = np.random.default_rng(seed)
    count = rows * columns
    codes = random.integers(0, 16, count)
    table = np.array(MAPS[kind], np.float32)
    blocks = -(-count // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    parts: dict[str, Any] = {"quant_map": torch.from_numpy(table)}
    if nested:
        steps = np.sort(random.uniform(-1, 1, 256)).astype(np.float32)
        own = random.uniform(0.01, 0.03, -(-blocks // nested)).astype(np.float32)
        raw, offset = random.integers(0, 256, blocks), 0.0625 + 2.0**-9
        absmax = [np.float32(np.float32(steps[raw[i]] * own[i // nested]) + np.float32(offset)) for i in range(blocks)]
        parts |= {"nested_absmax": torch.from_numpy(own), "nested_quant_map": torch.from_numpy(steps)}
        parts["absmax"] = torch.from_numpy(raw.astype(np.uint8))
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
    else:
        absmax = list(random.uniform(0.05, 0.1, blocks).astype(np.float32))
        parts["absmax"] = torch.from_numpy(np.array(absmax))
    values = numbers(rows, columns, lambda n, k: table[codes[n * columns + k]] * absmax[(n * columns + k) // block])
    halves = [16 * int(codes[i]) + (int(codes[i + 1]) if i + 1 < count else 0) for i in range(0, count, 2)]
    tensors = {f"weight.{part}": tensor for part, tensor in parts.items()}
    tensors["weight"] = torch.tensor(halves, dtype=torch.uint8)[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = json_bytes(state)
    return Packed(tensors, values)


def json_bytes(table: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(table).encode()), dtype=torch.uint8)


def bnb_eight(rows: int, columns: int, seed: int = 0) -> Packed:
    """Greatest values that are 127 times what float16 has, so that nothing is rounded."""
    random = np.random.default_rng(seed)
    signed = random.integers(-127, 128, (rows, columns))
    scales = random.uniform(0.5, 1, rows).astype(np.float16).astype(np.float64) / 1024
    greatest = torch.from_numpy((127 * scales).astype(np.float32))
    values = numbers(rows, columns, lambda n, k: signed[n, k] * scales[n])
    tensors = {"weight": torch.from_numpy(signed.astype(np.int8)), "SCB": greatest}
    return Packed(tensors | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, values)


# --- GPTQ ----------------------------------------------------------------------------------------


def gptq(
    rows: int, columns: int, bits: int, group: int, zeros: tuple[int, int], less: int = 1, seed: int = 0
) -> Packed:
    """Zeros from zeros[0] to zeros[1], stored less `less`; of 3 bits, words hold parts of numbers."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (rows, columns))
    group = columns if group == -1 else group
    groups = -(-columns // group)
    scales, s = floats(random.uniform(0.5, 1, (groups, rows)) * SPREAD / (1 << bits), torch.float16)
    zero = random.integers(zeros[0], zeros[1] + 1, (groups, rows))
    values = numbers(rows, columns, lambda n, k: s[k // group, n] * (codes[n, k] - zero[k // group, n]))
    tensors = {
        "qweight": word_rows(codes, bits, np.int32).T.contiguous(),  # words along the columns
        "qzeros": word_rows(zero - less, bits, np.int32),
        "scales": scales,
        "g_idx": torch.tensor([k // group for k in range(columns)], dtype=torch.int32),
    }
    return Packed(tensors, values)
