"""GGUF's block types as llmc's block formats, number by number: nothing is rounded, nothing is quantized again.

Each type has a function from raw blocks (M, bytes of a block) to their codes (M, columns of a block) and tables
(M, entries of a block). Codes are unsigned here and there: what GGUF stores signed is moved up by the format's offset.
Where the numbers stand in a block: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h (the
structs block_q4_0 and on) and ggml-quants.c (dequantize_row_q4_0 and on).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import FORMATS, BlockFormat, Quantized, ceil_to

U8 = NDArray[np.uint8]
Tables = dict[str, NDArray[np.generic]]
Blocks = tuple[U8, Tables]

CHUNK = 1 << 21  # bytes of blocks taken apart at a time: bounds what is in memory besides the result


def kept_format(stored: str) -> str | None:
    """The format that holds blocks of this GGUF type without loss, None when there is none."""
    return _KINDS[stored][0] if stored in _KINDS else None


def read_blocks(raw: U8, stored: str) -> Quantized:
    """Rows of blocks as they are in the file (N, blocks, bytes of a block) -> their codes and tables.

    Scales are as stored: NaN and infinity are for the caller to refuse.
    """
    name, unpack = _KINDS[stored]
    format = FORMATS[name]
    assert isinstance(format, BlockFormat)
    result: Quantized | None = None
    step = max(1, CHUNK // max(1, raw.shape[1] * raw.shape[2]))
    for start in range(0, len(raw), step):
        part = raw[start : start + step]
        codes, tables = unpack(part.reshape(-1, raw.shape[2]))
        columns = codes.size // len(part)
        result = result or _empty(format, len(raw), columns)
        result.codes[start : start + step, :columns] = codes.reshape(len(part), -1)
        for key, table in tables.items():
            rows = table.reshape(len(part), -1)
            result.tables[key][start : start + step, : rows.shape[1]] = rows
    return result or _empty(format, 0, 0)


def _empty(format: BlockFormat, rows: int, columns: int) -> Quantized:
    """Codes and tables of zeros for `columns` padded to whole records: a block that stays so decodes to 0."""
    width = ceil_to(columns, format.columns)
    blocks, records = width // format.block, width // format.columns
    sizes: dict[str, tuple[int, type]] = {"scale": (blocks, np.float16)}
    if format.scale == "super":
        sizes = {"scale": (records, np.float16), "sub_scale": (blocks, np.int8)}
    if format.offset == "minimum":
        sizes["minimum"] = sizes["scale"]
        if format.scale == "super":
            sizes["sub_minimum"] = (blocks, np.uint8)
    tables: Tables = {name: np.zeros((rows, count), dtype) for name, (count, dtype) in sizes.items()}
    return Quantized(np.zeros((rows, width), np.uint8), tables)


def _spread(packed: U8, groups: int, bits: int) -> U8:
    """(M, bytes) -> (M, codes of `bits` bits): of each of `groups` runs of bytes the lowest bits come first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    pieces = (packed.reshape(len(packed), groups, 1, -1) >> shifts) & np.uint8((1 << bits) - 1)
    return pieces.reshape(len(packed), -1)


def _half(packed: U8) -> NDArray[np.float16]:
    """(M, 2) bytes -> (M,) float16."""
    return np.ascontiguousarray(packed).view("<f2")[:, 0]


def _q8_0(raw: U8) -> Blocks:
    # int8 x as a byte is x mod 256; its highest bit turned over, that is x + 128.
    return raw[:, 2:] ^ np.uint8(128), {"scale": _half(raw[:, :2])}


def _q4_0(raw: U8) -> Blocks:
    return _spread(raw[:, 2:], 1, 4), {"scale": _half(raw[:, :2])}


def _q4_1(raw: U8) -> Blocks:
    return _spread(raw[:, 4:], 1, 4), {"scale": _half(raw[:, :2]), "minimum": _half(raw[:, 2:4])}


def _fifth_bits(packed: U8) -> U8:
    """(M, 4) bytes, one bit a code -> (M, 32), each 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(raw: U8) -> Blocks:
    return _spread(raw[:, 6:], 1, 4) | _fifth_bits(raw[:, 2:6]), {"scale": _half(raw[:, :2])}


def _q5_1(raw: U8) -> Blocks:
    codes = _spread(raw[:, 8:], 1, 4) | _fifth_bits(raw[:, 4:8])
    return codes, {"scale": _half(raw[:, :2]), "minimum": _half(raw[:, 2:4])}


def _q2_k(raw: U8) -> Blocks:
    subs = raw[:, :16]
    return _spread(raw[:, 16:80], 2, 2), {
        "scale": _half(raw[:, 80:82]),
        "minimum": _half(raw[:, 82:84]),
        "sub_scale": (subs & np.uint8(15)).view(np.int8),
        "sub_minimum": subs >> np.uint8(4),
    }


def _q3_k(raw: U8) -> Blocks:
    # The third bit says "do not subtract 4": as a bit of weight 4 it makes codes 0..7 around 4.
    codes = _spread(raw[:, 32:96], 2, 2) | _spread(raw[:, :32], 1, 1) << np.uint8(2)
    subs = _spread(raw[:, 96:104], 1, 4) | _spread(raw[:, 104:108], 1, 2) << np.uint8(4)
    return codes, {"scale": _half(raw[:, 108:110]), "sub_scale": subs.view(np.int8) - np.int8(32)}


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
        "scale": _half(raw[:, :2]),
        "minimum": _half(raw[:, 2:4]),
        "sub_scale": sub_scale.view(np.int8),
        "sub_minimum": sub_minimum,
    }


def _q4_k(raw: U8) -> Blocks:
    return _spread(raw[:, 16:], 4, 4), _k_tables(raw)


def _q5_k(raw: U8) -> Blocks:
    return _spread(raw[:, 48:], 4, 4) | _spread(raw[:, 16:48], 1, 1) << np.uint8(4), _k_tables(raw)


def _q6_k(raw: U8) -> Blocks:
    codes = _spread(raw[:, :128], 2, 4) | _spread(raw[:, 128:192], 2, 2) << np.uint8(4)
    return codes, {"scale": _half(raw[:, 208:]), "sub_scale": np.ascontiguousarray(raw[:, 192:208]).view(np.int8)}


def _mxfp4(raw: U8) -> Blocks:
    # The scale is 2 ** (first byte - 128) of values that are doubled, here and there.
    codes = _spread(raw[:, 1:], 1, 4)
    scale = np.ldexp(np.float32(1), raw[:, 0].astype(np.int32) - 128)
    with np.errstate(over="ignore"):
        kept = scale.astype(np.float16)
    if ((kept != scale) & (codes & np.uint8(7)).any(1)).any():  # the scale of zeros does not matter
        raise SourceError("MXFP4 blocks of a scale that float16 cannot hold; compile with --quant q4 or another format")
    return codes, {"scale": np.where(kept == scale, kept, np.float16(0))}


# GGUF type -> our format, how to take a block apart. IQ4_NL's codes name entries of the same table here and there.
_KINDS: dict[str, tuple[str, Callable[[U8], Blocks]]] = {
    "Q8_0": ("q8", _q8_0),
    "Q4_0": ("q4_0", _q4_0),
    "Q4_1": ("q4", _q4_1),
    "Q5_0": ("q5_0", _q5_0),
    "Q5_1": ("q5_1", _q5_1),
    "IQ4_NL": ("iq4_nl", _q4_0),
    "MXFP4": ("mxfp4", _mxfp4),
    "Q2_K": ("q2_k", _q2_k),
    "Q3_K": ("q3_k", _q3_k),
    "Q4_K": ("q4_k", _q4_k),
    "Q5_K": ("q5_k", _q5_k),
    "Q6_K": ("q6_k", _q6_k),
}
