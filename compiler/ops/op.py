"""What an op of the table is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Attr = int | float | str
Shape = tuple[Any, ...]  # of int or tirx expressions
Result = list[tuple[Shape, str]]  # shape and dtype of each output


@dataclass(frozen=True)
class Op:
    """One operation. `result(shapes, attrs)` gives the outputs; `meaning(*arrays, **attrs)` computes them."""

    name: str
    operands: tuple[str, ...]
    attrs: tuple[str, ...]
    result: Callable[[list[Shape], dict[str, Attr]], Result]
    meaning: Callable[..., Any]
    doc: str
    source: str
