"""Weight formats: how a matrix (N, K) is stored, and what the stored bytes mean.

table.py lists them; plain.py and block.py are the two kinds; layout.py is the memory of block formats; minmax.py and
search.py choose codes and scales; activations.py is the other side of the product.
"""

from __future__ import annotations

from llmc.compiler.formats.activations import (
    BLOCK,
    GROUP,
    MIDDLE,
    ROTATED,
    SUM_BLOCK,
    dequantize_rows,
    quantize_rotated,
    quantize_rows,
    rotate_rows,
)
from llmc.compiler.formats.block import BlockFormat, Quantized, dequantize, join
from llmc.compiler.formats.layout import decode, encode
from llmc.compiler.formats.plain import TILE, PlainFormat, ceil_to, from_bf16, to_bf16
from llmc.compiler.formats.table import FORMATS, NF4_ONE, OFFERED, Format, block_format

__all__ = [
    "BLOCK",
    "FORMATS",
    "GROUP",
    "MIDDLE",
    "NF4_ONE",
    "OFFERED",
    "ROTATED",
    "SUM_BLOCK",
    "TILE",
    "BlockFormat",
    "Format",
    "PlainFormat",
    "Quantized",
    "block_format",
    "ceil_to",
    "decode",
    "dequantize",
    "dequantize_rows",
    "encode",
    "from_bf16",
    "join",
    "quantize_rotated",
    "quantize_rows",
    "rotate_rows",
    "to_bf16",
]
