"""What run.py asks of a reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from llmc.compiler.errors import LlmcError
from llmc.frontends.tensor import Tensor


@dataclass(frozen=True)
class Reader:
    """`samples` are read; `make` gives an input that may be anything; `read` raises one of `refusals` for what is bad.

    `lay` puts an input where `read` finds it.
    """

    samples: Sequence[Any]
    make: Callable[[Random], Any]
    read: Callable[[Any], None]
    refusals: tuple[type[Exception], ...] = (LlmcError,)
    lay: Callable[[Any], object] = id


def read_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every value, where their type can be read. No more can come out than the file holds."""
    room = path.stat().st_size * 32  # a block of 2 bits a value, as float32
    for tensor in tensors.values():
        if not tensor.readable:
            continue
        try:
            values = tensor.read()
        except LlmcError:
            continue
        assert values.dtype == np.float32
        assert values.shape == tensor.shape
        assert np.isfinite(values).all()
        assert values.nbytes <= room + 4096
