"""The row of the op table for short convolutions. Letters: M rows, D channels, L tokens that a channel sees."""

from __future__ import annotations

import math
from typing import Any

from llmc.compiler.kv_pages import PAGE
from llmc.compiler.meaning import convolution as meaning
from llmc.compiler.ops.op import Attr, Op, Result


def channels_of(page: list[Any], channels: int, first: int) -> int:
    """How many channels of a layer's, from `first` on, pages of this shape (pages, *page_shape) keep."""
    return min(math.prod(int(size) for size in page[1:]) // PAGE, channels - first)


def _result(shapes: list[Any], attrs: dict[str, Attr]) -> Result:
    return [((shapes[0][0], channels_of(shapes[2], int(shapes[1][1]), int(attrs["first"]))), "float32")]


ROWS = (
    Op(
        "short_convolution",
        ("bcx", "taps", "kv", "seqs", "slots", "page_indptr", "page_ids"),
        ("first", "kv_dtype"),
        _result,
        meaning.short_convolution,
        "bcx (M, 3D) has b, c and x of each channel, a sequence's rows side by side and in order. Writes b x of "
        "channels first..first + N - 1 into kv (pages, *page_shape), in place, as many as it keeps of a token or all "
        "that are left; then channel d of row i, of slot s, is c times the sum of taps[L - 1 - j, d], of taps (L, D), "
        "times what was written for slot s - j, j = 0..L - 1, as far as there are such slots -> (M, N). An op with an "
        "effect, as attention. kv_dtype is f32 or bf16",
        "https://arxiv.org/abs/2511.23404 section 2.1",
    ),
)
