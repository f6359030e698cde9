"""What the front tells the others, and who of them answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.loading.device_manifest import DeviceManifest

Array = NDArray[Any]

# Messages: CALL with its number, a function's place in the manifest, and index arrays;
# COPY with a group of layers, a page and the page to copy it to; USE with a group and how many of its first pages will
# have been used; END. ANSWER with a call's number, and what it gave.
CALL, COPY, USE, END, ANSWER = range(5)

_ALIGN = 16  # int32 in 64 bytes, from multiples of which on kernels want their arrays
_DTYPES = (np.dtype(np.int32), np.dtype(np.float32))  # of arrays in messages


@dataclass(frozen=True)
class Message:
    """One message: its kind, numbers, and arrays, which are views of what was received."""

    kind: int
    numbers: tuple[int, ...]
    arrays: list[Array]


def packed(kind: int, numbers: Sequence[int], arrays: Sequence[Array] = ()) -> NDArray[np.int32]:
    """A message as one flat array: a head (lengths, numbers, dtype and shape of each array), then the arrays.

    Arrays are of int32 or float32; head and arrays begin at multiples of 64 bytes.
    """
    head = [kind, len(numbers), len(arrays), *numbers]
    for array in arrays:
        head += (_DTYPES.index(array.dtype), array.ndim, *array.shape)
    at = _rounded(len(head) + 1)
    whole = np.empty(at + sum(_rounded(array.size) for array in arrays), np.int32)
    whole[0], whole[1 : len(head) + 1] = at, head
    for array in arrays:
        whole[at : at + array.size] = array.view(np.int32).ravel()
        at += _rounded(array.size)
    return whole


def unpacked(whole: NDArray[np.int32]) -> Message:
    """What `packed` made."""
    at = int(whole[0])
    kind, count, many, *head = whole[1:at].tolist()
    place, arrays = count, []
    for _ in range(many):
        dtype, ndim = head[place : place + 2]
        shape = head[place + 2 : place + 2 + ndim]
        place += 2 + ndim
        size = math.prod(shape)
        arrays.append(whole[at : at + size].view(_DTYPES[dtype]).reshape(shape))
        at += _rounded(size)
    return Message(kind, tuple(head[:count]), arrays)


class Answers:
    """Which rank gives what the front looks at."""

    def __init__(self, manifest: DeviceManifest) -> None:
        self._ranks = manifest.ranks

    def source(self, name: str) -> int | None:
        """The first rank that gives the function's first output; None where all of them only keep things alive."""
        found = (rank for rank, each in enumerate(self._ranks) if 0 in each.outputs[name])
        return next(found, None)

    def of(self, name: str, rank: int, given: list[Any]) -> list[Any]:
        """What a rank's function gave of the model's outputs: zeros of sends follow them."""
        return given[: len(self._ranks[rank].outputs[name])]


def _rounded(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
