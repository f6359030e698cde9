"""GGUF's block types as llmc's block formats, number by number: nothing is rounded, nothing is quantized again.

Each type has a function from raw blocks to their codes and tables: block_types.py, grid_types.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmc.compiler.formats import BlockFormat, Quantized, block_format, ceil_to
from llmc.frontends.gguf import block_types, grid_types
from llmc.frontends.gguf.block_types import U8, Blocks, Tables

CHUNK = 1 << 21  # bytes of blocks taken apart at a time: bounds what is in memory besides the result


def kept_format(stored: str) -> str | None:
    """The format that holds blocks of this GGUF type without loss, None when there is none."""
    return _KINDS[stored][0] if stored in _KINDS else None


def read_blocks(raw: U8, stored: str) -> Quantized:
    """Rows of blocks as they are in the file (N, blocks, bytes of a block) -> their codes and tables.

    Scales are as stored: NaN and infinity are for the caller to refuse.
    """
    name, unpack = _KINDS[stored]
    format = block_format(name)
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


# GGUF type -> our format, how to take a block apart. IQ4_NL's codes name entries of the same table here and there.
_KINDS: dict[str, tuple[str, Callable[[U8], Blocks]]] = {
    "Q8_0": ("q8", block_types.q8_0),
    "Q4_0": ("q4_0", block_types.q4_0),
    "Q4_1": ("q4", block_types.q4_1),
    "Q5_0": ("q5_0", block_types.q5_0),
    "Q5_1": ("q5_1", block_types.q5_1),
    "IQ4_NL": ("iq4_nl", block_types.q4_0),
    "MXFP4": ("mxfp4", block_types.mxfp4),
    "NVFP4": ("nvfp4", block_types.nvfp4),
    "Q2_K": ("q2_k", block_types.q2_k),
    "Q3_K": ("q3_k", block_types.q3_k),
    "Q4_K": ("q4_k", block_types.q4_k),
    "Q5_K": ("q5_k", block_types.q5_k),
    "Q6_K": ("q6_k", block_types.q6_k),
    "IQ4_XS": ("iq4_xs", block_types.iq4_xs),
    "TQ1_0": ("tq2_0", block_types.tq1_0),
    "TQ2_0": ("tq2_0", block_types.tq2_0),
    "IQ3_S": ("iq3_s", grid_types.iq3_s),
    "IQ3_XXS": ("iq3_xxs", grid_types.iq3_xxs),
    "IQ2_S": ("iq2_s", grid_types.iq2_s),
    "IQ2_XS": ("iq2_s", grid_types.iq2_xs),
    "IQ2_XXS": ("iq2_xxs", grid_types.iq2_xxs),
    "IQ1_M": ("iq1_m", grid_types.iq1_m),
    "IQ1_S": ("iq1_m", grid_types.iq1_s),
}
