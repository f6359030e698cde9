"""GGUF's block types in which every column's code stands by itself: raw blocks -> codes and tables.

Each function takes blocks (M, bytes of a block) to codes (M, columns of a block) and tables (M, entries of a block).
Codes are unsigned here and there: what GGUF stores signed is moved up by the format's offset.
Where the numbers stand in a block: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h (the
structs block_q4_0 and on) and ggml-quants.c (dequantize_row_q4_0 and on).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError

U8 = NDArray[np.uint8]
Tables = dict[str, NDArray[np.generic]]
Blocks = tuple[U8, Tables]


def spread(packed: U8, groups: int, bits: int) -> U8:
    """(M, bytes) -> (M, codes of `bits` bits): of each of `groups` runs of bytes the lowest bits come first.

    With as many groups as bytes the codes of a byte stand side by side.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    pieces = (packed.reshape(len(packed), groups, 1, -1) >> shifts) & np.uint8((1 << bits) - 1)
    return pieces.reshape(len(packed), -1)


def half(packed: U8) -> NDArray[np.float16]:
    """(M, 2) bytes -> (M,) float16."""
    return np.ascontiguousarray(packed).view("<f2")[:, 0]


def q8_0(raw: U8) -> Blocks:
    # int8 x as a byte is x mod 256; its highest bit turned over, that is x + 128.
    return raw[:, 2:] ^ np.uint8(128), {"scale": half(raw[:, :2])}


def q4_0(raw: U8) -> Blocks:
    return spread(raw[:, 2:], 1, 4), {"scale": half(raw[:, :2])}


def q4_1(raw: U8) -> Blocks:
    return spread(raw[:, 4:], 1, 4), {"scale": half(raw[:, :2]), "minimum": half(raw[:, 2:4])}


def single_bits(packed: U8, bit: int) -> U8:
    """(M, bytes), one bit a code -> (M, codes), each 0 or `bit`."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(bit)


def q5_0(raw: U8) -> Blocks:
    return spread(raw[:, 6:], 1, 4) | single_bits(raw[:, 2:6], 16), {"scale": half(raw[:, :2])}


def q5_1(raw: U8) -> Blocks:
    codes = spread(raw[:, 8:], 1, 4) | single_bits(raw[:, 4:8], 16)
    return codes, {"scale": half(raw[:, :2]), "minimum": half(raw[:, 2:4])}


def q2_k(raw: U8) -> Blocks:
    subs = raw[:, :16]
    return spread(raw[:, 16:80], 2, 2), {
        "scale": half(raw[:, 80:82]),
        "minimum": half(raw[:, 82:84]),
        "sub_scale": (subs & np.uint8(15)).view(np.int8),
        "sub_minimum": subs >> np.uint8(4),
    }


def q3_k(raw: U8) -> Blocks:
    # The third bit says "do not subtract 4": as a bit of weight 4 it makes codes 0..7 around 4.
    codes = spread(raw[:, 32:96], 2, 2) | spread(raw[:, :32], 1, 1) << np.uint8(2)
    subs = spread(raw[:, 96:104], 1, 4) | spread(raw[:, 104:108], 1, 2) << np.uint8(4)
    return codes, {"scale": half(raw[:, 108:110]), "sub_scale": subs.view(np.int8) - np.int8(32)}


def iq4_xs(raw: U8) -> Blocks:
    # Scales of 6 bits around 32: upper two bits in bytes 2 and 3, lower four in bytes 4 to 7.
    subs = spread(raw[:, 4:8], 4, 4) | spread(raw[:, 2:4], 2, 2) << np.uint8(4)
    return spread(raw[:, 8:], 8, 4), {"scale": half(raw[:, :2]), "sub_scale": subs.view(np.int8) - np.int8(32)}


def tq2_0(raw: U8) -> Blocks:
    return spread(raw[:, :64], 2, 2), _one_scale(raw[:, 64:])


def tq1_0(raw: U8) -> Blocks:
    """Five digits of base 3 a byte, as a fraction of 256: times three, what is above the byte is the first of them."""
    codes = [_thirds(raw[:, :32], 5), _thirds(raw[:, 32:48], 5), _thirds(raw[:, 48:52], 4)]
    return np.concatenate(codes, axis=1), _one_scale(raw[:, 52:])


def _thirds(packed: U8, digits: int) -> U8:
    """(M, bytes) -> (M, digits * bytes), first digits first."""
    shifted = packed[:, None, :] * np.array([3**i for i in range(digits)], np.uint8)[:, None]
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def _one_scale(packed: U8) -> Tables:
    return {"scale": half(packed), "sub_scale": np.ones((len(packed), 8), np.int8)}


def _k_tables(raw: U8) -> Tables:
    """The first 16 bytes of Q4_K and Q5_K: two float16, then eight scales and eight minima of 6 bits each.

    The first four of each are the low bits of bytes 0-3 and 4-7; the others have their low four bits in bytes 8-11
    (scales low, minima high) and their upper two bits above the first four's.
    """
    low, high, mixed = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    six, four = np.uint8(63), np.uint8(15)
    upper = [(part >> np.uint8(2)) & np.uint8(48) for part in (low, high)]
    sub_scale = np.concatenate([low & six, (mixed & four) | upper[0]], axis=1)
    sub_minimum = np.concatenate([high & six, (mixed >> np.uint8(4)) | upper[1]], axis=1)
    return {
        "scale": half(raw[:, :2]),
        "minimum": half(raw[:, 2:4]),
        "sub_scale": sub_scale.view(np.int8),
        "sub_minimum": sub_minimum,
    }


def q4_k(raw: U8) -> Blocks:
    return spread(raw[:, 16:], 4, 4), _k_tables(raw)


def q5_k(raw: U8) -> Blocks:
    return spread(raw[:, 48:], 4, 4) | spread(raw[:, 16:48], 1, 1) << np.uint8(4), _k_tables(raw)


def q6_k(raw: U8) -> Blocks:
    codes = spread(raw[:, :128], 2, 4) | spread(raw[:, 128:192], 2, 2) << np.uint8(4)
    return codes, {"scale": half(raw[:, 208:]), "sub_scale": np.ascontiguousarray(raw[:, 192:208]).view(np.int8)}


def mxfp4(raw: U8) -> Blocks:
    # The scale is 2 ** (first byte - 128) of values that are doubled, here and there.
    codes = spread(raw[:, 1:], 1, 4)
    scale = np.ldexp(np.float32(1), raw[:, 0].astype(np.int32) - 128)
    with np.errstate(over="ignore"):
        kept = scale.astype(np.float16)
    if ((kept != scale) & (codes & np.uint8(7)).any(1)).any():  # the scale of zeros does not matter
        raise SourceError("MXFP4 blocks of a scale that float16 cannot hold; compile with --quant q4 or another format")
    return codes, {"scale": np.where(kept == scale, kept, np.float16(0))}


def nvfp4(raw: U8) -> Blocks:
    # Four blocks of 16, as MXFP4's are; scales are E4M3 without a sign, whose greatest code is zero.
    codes = spread(raw[:, 4:].reshape(-1, 8), 1, 4).reshape(len(raw), 64)
    stored = raw[:, :4] & np.uint8(0x7F)
    exponent, fraction = (stored >> 3).astype(np.int32), (stored & np.uint8(7)).astype(np.float32)
    scale = np.ldexp(np.where(exponent == 0, fraction, 8 + fraction), np.maximum(exponent, 1) - 11)
    return codes, {"scale": np.where(raw[:, :4] == 0x7F, 0, scale).astype(np.float16)}
