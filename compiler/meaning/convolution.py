"""What the op of short convolutions means, in NumPy: slow, obvious, float32.

Pages keep products of channels here in place of keys and values: where they have W elements of a kv head's keys, or of
its values, of 16 tokens, they have W channels of these tokens, one token after another.

Letters: M rows, D channels of a layer, N of them in these pages, L tokens that a channel sees, S sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats import from_bf16, to_bf16
from llmc.compiler.kv_pages import PAGE

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# Kinds of pages that keep numbers, not codes -> how these are written and read.
KINDS: dict[str, tuple[Any, Any]] = {"f32": (np.asarray, np.asarray), "bf16": (to_bf16, from_bf16)}


def short_convolution(
    bcx: F32, taps: F32, kv: NDArray[Any], seqs: I32, slots: I32, page_indptr: I32, page_ids: I32,
    first: int, kv_dtype: str,
) -> F32:  # fmt: skip
    """bcx (M, 3D), taps (L, D), kv written in place -> (M, N), of channels first..first + N - 1."""
    write, read = KINDS[kv_dtype]
    width = kv.shape[3] // PAGE
    tokens = kv.reshape(len(kv), -1, PAGE, width).swapaxes(1, 2)  # (pages, 16, N / W, W)
    channels = min(tokens.shape[2] * width, taps.shape[1] - first)
    b, c, x = (part[:, first : first + channels] for part in np.split(bcx, 3, axis=1))

    def kept(row: int, slot: int) -> NDArray[Any]:
        found: NDArray[Any] = tokens[page_ids[page_indptr[seqs[row]] + slot // PAGE], slot % PAGE]
        return found

    for row, slot in enumerate(slots.tolist()):
        kept(row, slot).flat[:channels] = write(b[row] * x[row])
    out = np.zeros((len(bcx), channels), np.float32)
    for row, slot in enumerate(slots.tolist()):
        for back in reversed(range(min(len(taps), slot + 1))):
            tap = taps[len(taps) - 1 - back, first : first + channels]
            out[row] += tap * read(kept(row, slot - back).reshape(-1)[:channels])
    return np.asarray(c * out)
