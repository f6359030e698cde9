"""GGUF's types of 1 to 3 bits that name several columns at once: an entry of a grid, signs beside it.

An entry has the magnitudes of four or eight columns; here every column has a code of its own, so that kernels look up
16 or 8 numbers and not thousands. Functions are as in block_types.py. The grids are those of the gguf package, codes
are those of compiler/formats/table.py: a magnitude's place among the grid's, and one bit above it for a minus.
Where the numbers stand in a block: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h (the
structs block_iq2_xxs and on) and ggml-quants.c (dequantize_row_iq2_xxs and on).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from llmc.frontends.gguf.block_types import U8, Blocks, half, single_bits, spread

U16 = NDArray[np.uint16]


@cache
def _grid(kind: str) -> U8:
    """(entries, columns of an entry) codes, of magnitudes or, of IQ1, of numbers."""
    from gguf import quants  # slow to import, and few files need it

    of = getattr(quants, kind)
    of.init_grid()
    grid = of.grid.reshape(-1, of.grid_shape[1])
    return np.searchsorted(np.unique(grid), grid).astype(np.uint8)


def _codes(kind: str, entries: U16 | U8) -> U8:
    """(M, entries) -> (M, columns), without signs."""
    return _grid(kind)[entries].reshape(len(entries), -1)


def _even(signs: U8 | U16 | NDArray[np.uint32]) -> U8:
    """Seven signs, the lowest bits of a number -> eight: the last one makes the count of minuses even."""
    seven = np.arange(128, dtype=np.uint8)
    odd = np.bitwise_xor.reduce(np.unpackbits(seven[:, None], axis=1), axis=1)
    return (seven | odd << np.uint8(7))[signs & signs.dtype.type(127)]


def _words(packed: U8, dtype: str) -> NDArray[np.generic]:
    return np.ascontiguousarray(packed).view(dtype)


def _steps(scales: NDArray[np.generic]) -> NDArray[np.int8]:
    """Numbers s of a few bits -> 2 * s + 1, what a block's scale is a multiple of."""
    return (2 * scales + 1).astype(np.int8)


def _signs_and_scales(packed: U8) -> tuple[U8, NDArray[np.int8]]:
    """(M, words of four bytes), each four times seven signs and a scale of 4 bits -> (M, 4 * words), (M, words)."""
    words = _words(packed, "<u4").astype(np.uint32)
    signs = _even(words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32))
    return signs.reshape(len(packed), -1), _steps(words >> np.uint32(28))


def iq2_xxs(raw: U8) -> Blocks:
    parts = raw[:, 2:].reshape(len(raw), 8, 8)
    signs, steps = _signs_and_scales(parts[:, :, 4:].reshape(len(raw), -1))
    codes = _codes("IQ2_XXS", parts[:, :, :4].reshape(len(raw), -1)) | single_bits(signs, 4)
    return codes, {"scale": half(raw[:, :2]), "sub_scale": steps}


def iq2_xs(raw: U8) -> Blocks:
    both = _words(raw[:, 2:66], "<u2").astype(np.uint16)
    codes = _codes("IQ2_XS", both & np.uint16(511)) | single_bits(_even(both >> np.uint16(9)), 4)
    return codes, {"scale": half(raw[:, :2]), "sub_scale": _steps(spread(raw[:, 66:], 8, 4))}


def iq2_s(raw: U8) -> Blocks:
    entries = raw[:, 2:34] | spread(raw[:, 66:74], 8, 2).astype(np.uint16) << np.uint16(8)
    codes = _codes("IQ2_S", entries) | single_bits(raw[:, 34:66], 4)
    return codes, {"scale": half(raw[:, :2]), "sub_scale": _steps(spread(raw[:, 74:], 8, 4))}


def iq3_xxs(raw: U8) -> Blocks:
    signs, steps = _signs_and_scales(raw[:, 66:])
    return _codes("IQ3_XXS", raw[:, 2:66]) | single_bits(signs, 8), {"scale": half(raw[:, :2]), "sub_scale": steps}


def iq3_s(raw: U8) -> Blocks:
    entries = raw[:, 2:66] | single_bits(raw[:, 66:74], 1).astype(np.uint16) << np.uint16(8)
    codes = _codes("IQ3_S", entries) | single_bits(raw[:, 74:106], 8)
    return codes, {"scale": half(raw[:, :2]), "sub_scale": _steps(spread(raw[:, 106:], 4, 4))}


def iq1_s(raw: U8) -> Blocks:
    # Of 32 columns: three bits of each entry, the scale, an eighth's sign.
    high = _words(raw[:, 34:], "<u2").astype(np.uint16)
    upper = (high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(len(raw), -1)
    codes = _codes("IQ1_S", raw[:, 2:34] | upper << np.uint16(8))
    less = np.repeat((high >> np.uint16(15)).astype(np.uint8), 32, axis=1)
    steps = np.repeat(_steps(high >> np.uint16(12) & np.uint16(7)), 2, axis=1)
    return codes | less << np.uint8(2), {"scale": half(raw[:, :2]), "sub_scale": steps}


def iq1_m(raw: U8) -> Blocks:
    high = spread(raw[:, 32:48], 16, 4)  # of 8 columns: three bits of the entry, an eighth's sign
    codes = _codes("IQ1_S", raw[:, :32] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8))
    less = np.repeat(high >> np.uint8(3), 8, axis=1)
    words = _words(raw[:, 48:], "<u2").astype(np.uint16)  # four scales of 3 bits, four bits of the float16
    subs = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(len(raw), -1)
    scale = (words >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16)).sum(1, dtype=np.uint16)
    return codes | less << np.uint8(2), {"scale": scale.view(np.float16), "sub_scale": _steps(subs)}
