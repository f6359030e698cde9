"""Every weight format there is."""

from __future__ import annotations

import numpy as np

from llmc.compiler.formats.block import U8, BlockFormat
from llmc.compiler.formats.codebooks import CODEBOOKS
from llmc.compiler.formats.minmax import absmax, minmax, pair_grid
from llmc.compiler.formats.plain import BF16_FORMAT, F32_FORMAT, PlainFormat
from llmc.compiler.formats.search import search

Format = PlainFormat | BlockFormat

# GGUF's IQ4_NL: sixteen values, denser near zero (ggml-common.h kvalues_iq4nl), moved up by 128.
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]) + 128

# The lead seed's: Inferflow Eq. 1-5, two float16 a block. `q8` alone is symmetric, as the seed's default q8 is.
_SEED = (
    BlockFormat("q8", (8,), 32, "f16", 128, absmax),
    BlockFormat("q8_b32", (8,), 32, "f16", "minimum", minmax),
    BlockFormat("q6", (6,), 64, "f16", "minimum", minmax),
    BlockFormat("q5", (4, 1), 64, "f16", "minimum", minmax),
    BlockFormat("q4", (4,), 32, "f16", "minimum", minmax),
    BlockFormat("q4_b64", (4,), 64, "f16", "minimum", minmax),
    BlockFormat("q3h", (7,), 64, "f16", "minimum", minmax, pair=True, values=pair_grid()),
    BlockFormat("q3", (2, 1), 32, "f16", "minimum", minmax),
    BlockFormat("q2", (2,), 32, "f16", "minimum", minmax),
)

# Ours: a codebook, a signed byte of scale a block and one float32 a row; codes of two columns below 4 bits.
_OURS = tuple(
    BlockFormat(name, planes, 32, "row", 64, search, pair=pair, values=CODEBOOKS[name])
    for name, planes, pair in (
        ("c6", (6,), False),
        ("c5", (4, 1), False),
        ("c4", (4,), False),
        ("c3h", (7,), True),
        ("c3", (6,), True),
        ("c2h", (4, 1), True),
        ("c2", (4,), True),
    )
)

# Ours, rotated: large numbers of a row are spread over 64 columns, so longer blocks do, of weights and of activations.
# A block's dots are summed as integers, so that there is half as much to do with each sum.
_ROTATED = (
    BlockFormat("r8", (8,), 64, "row", 128, absmax, rotated=True),
    *(
        BlockFormat(name, planes, 64, "row", 64, search, pair=pair, values=CODEBOOKS[name], rotated=True)
        for name, planes, pair in (
            ("r6", (6,), False),
            ("r5", (4, 1), False),
            ("r4", (4,), False),
            ("r3h", (7,), True),
        )
    ),
)

# MXFP4's sixteen values, doubled and moved up by 12; the last eight are the first ones' negatives (OCP MX 5.3.3).
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) + 12


def _signed(magnitudes: list[int]) -> U8:
    """What codes of numbers of these magnitudes stand for, moved up to be positive; their highest bit says minus."""
    padded = magnitudes + magnitudes[-1:] * ((1 << (len(magnitudes) - 1).bit_length()) - len(magnitudes))
    return (max(magnitudes) + np.array(padded + [-m for m in padded])).astype(np.uint8)


# GGUF's IQ3 and IQ2 name eight or four numbers of these at once. IQ1 has -1, 0 or 1, all with an eighth more or less.
_IQ3_XXS, _IQ3_S, _IQ2 = [4, 12, 20, 28, 36, 44, 52, 62], [1, 3, 5, 7, 9, 11, 13, 15], [8, 25, 43]
_IQ1 = np.array([-7, 1, 9, 9, -9, -1, 7, 7]) + 9

# NF4: sixteen quantiles of a normal distribution, the greatest 1 (arXiv 2305.14314 appendix E), in whole numbers. Of
# all ways to count, this is where they are off least, 0.33 % of their size (root mean square).
NF4_ONE = 112.03
_NF4 = np.array([-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112]) + 128

# What checkpoints hold already: never chosen for floats, kept bit by bit. GGUF's Q8_0 and Q4_1 are q8 and q4.
# https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h; AWQ and GPTQ: whole-number zeros.
_KEPT = (
    BlockFormat("q4_0", (4,), 32, "f16", 8, None),
    BlockFormat("q5_0", (4, 1), 32, "f16", 16, None),
    BlockFormat("q5_1", (4, 1), 32, "f16", "minimum", None),
    BlockFormat("iq4_nl", (4,), 32, "f16", 128, None, values=_IQ4_NL.astype(np.uint8)),
    BlockFormat("q2_k", (2,), 16, "super", "minimum", None, columns=256, sub_bits=4),
    BlockFormat("q3_k", (2, 1), 16, "super", 4, None, columns=256),
    BlockFormat("q4_k", (4,), 32, "super", "minimum", None, columns=256),
    BlockFormat("q5_k", (4, 1), 32, "super", "minimum", None, columns=256),
    BlockFormat("q6_k", (6,), 16, "super", 32, None, columns=256),
    BlockFormat("iq4_xs", (4,), 32, "super", 128, None, columns=256, values=_IQ4_NL.astype(np.uint8)),
    BlockFormat("iq3_s", (4,), 32, "super", 15, None, columns=256, values=_signed(_IQ3_S)),
    BlockFormat("iq3_xxs", (4,), 32, "super", 62, None, columns=256, values=_signed(_IQ3_XXS), factor=1 / 4),
    BlockFormat("iq2_s", (2, 1), 16, "super", 43, None, columns=256, values=_signed(_IQ2), factor=1 / 8),
    BlockFormat("iq2_xxs", (2, 1), 32, "super", 43, None, columns=256, values=_signed(_IQ2), factor=1 / 8),
    BlockFormat("iq1_m", (2, 1), 16, "super", 9, None, columns=256, values=_IQ1.astype(np.uint8), factor=1 / 8),
    BlockFormat("tq2_0", (2,), 32, "super", 1, None, columns=256),
    BlockFormat("mxfp4", (4,), 32, "f16", 12, None, values=_E2M1.astype(np.uint8)),
    BlockFormat("nvfp4", (4,), 16, "f16", 12, None, values=_E2M1.astype(np.uint8)),
    BlockFormat("nf4", (4,), 64, "f16", 128, None, columns=128, values=_NF4.astype(np.uint8)),
    BlockFormat("q4_0_b64", (4,), 64, "f16", 8, None, columns=128),
    BlockFormat("int4_b32", (4,), 32, "f16", "zero", None),
    BlockFormat("int4_b64", (4,), 64, "f16", "zero", None),
)


_PLAIN: tuple[Format, ...] = (F32_FORMAT, BF16_FORMAT)
FORMATS: dict[str, Format] = {format.name: format for format in (*_PLAIN, *_SEED, *_OURS, *_ROTATED, *_KEPT)}
OFFERED = tuple(format.name for format in (*_PLAIN, *_SEED, *_OURS, *_ROTATED))  # what floats can be packed into


def block_format(name: str) -> BlockFormat:
    """The format of this name, one of codes in blocks."""
    format = FORMATS[name]
    assert isinstance(format, BlockFormat), name
    return format
