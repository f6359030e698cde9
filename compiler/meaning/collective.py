"""What the ops between devices mean, in NumPy: each device is a thread, which finds the others in `entered()`.

Letters: M rows, C columns. What compiled modules do instead is the business of whoever runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import LlmcError

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


class Others(Protocol):
    """How a device reaches others."""

    def gather(self, x: NDArray[Any], group: int) -> list[NDArray[Any]]:
        """What each device of the group gave in its call, in order of ranks."""

    def send(self, x: NDArray[Any], to: int) -> None:
        """Give it to a rank, which may take it later."""

    def receive(self, source: int) -> NDArray[Any]:
        """The oldest that a rank has sent here and that was not taken yet; waits for it."""


_here = threading.local()


@contextmanager
def entered(others: Others) -> Iterator[None]:
    """While it is open, ops of this thread reach others so."""
    _here.others = others
    try:
        yield
    finally:
        del _here.others


def _others() -> Others:
    others: Others | None = getattr(_here, "others", None)
    if others is None:
        raise LlmcError("a device's part of a model runs beside the other devices' (compiler/together.py), not alone")
    return others


def all_reduce(x: F32, group: int) -> F32:
    """(M, C) -> (M, C), added in order of ranks, so that all devices have the same bits."""
    first, *others = _others().gather(x, group)
    total = first.copy()
    for other in others:
        total += other
    return total


def all_gather(x: F32, group: int, width: int) -> F32:
    """(M, a device's columns) -> (M, C = width)."""
    whole = np.concatenate(_others().gather(x, group), axis=1)
    if whole.shape[1] != width:
        raise LlmcError(f"all_gather: {whole.shape[1]} columns of the devices together, wanted {width}")
    return whole


def send(x: F32, to: int) -> I32:
    """(M, C) -> (1,), a zero."""
    if to >= 0:
        _others().send(x, to)
    return np.zeros(1, np.int32)


def recv(like: NDArray[Any], source: int, width: int) -> F32:
    """(M, ...) -> (M, C = width)."""
    x = _others().receive(source)
    if x.shape != (len(like), width):
        raise LlmcError(f"recv from rank {source}: {x.shape}, wanted {(len(like), width)}")
    return x


def own_ids(ids: I32, first: int, count: int) -> I32:
    """(M,) or (M, U) -> the same shape."""
    own = ids - np.int32(first)
    return np.where((own >= 0) & (own < count), own, np.int32(-1)).astype(np.int32)


def take_columns(x: F32, first: int, count: int) -> F32:
    """(M, C) -> (M, count)."""
    return x[:, first : first + count]
