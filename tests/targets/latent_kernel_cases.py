"""Random inputs for the ops of latent attention; kernel_cases.py has the others and the runner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmc.compiler.formats import FORMATS, BlockFormat

sys.path.insert(0, str(Path(__file__).parent))
from expert_cases import LEFT
from kernel_cases import Case, Rng, floats, packed

FORMATS_OF = {
    "packed": ["f32", "q8", "c3h", "q4_k"],
    "bf16": ["bf16"],
    "i8": [name for name, format in FORMATS.items() if isinstance(format, BlockFormat)],
}


def head_linear_case(rng: Rng, kind: str, name: str = "") -> Case:
    """Heads of one tile or several; their slices are as wide as their matrices, or wider."""
    name = name or str(rng.choice([one for one in FORMATS_OF[kind] if one in FORMATS]))
    format = FORMATS[name]
    long = isinstance(format, BlockFormat) and format.columns > 64
    unit = 256 if long else 64 if kind == "i8" else 16
    heads, columns = int(rng.integers(1, 5)), unit * int(rng.integers(1, 4))
    step = columns + (64 if kind == "i8" else 2) * int(rng.integers(0, 4))
    width = heads * 16 * int(rng.integers(1, 4))
    x = floats(rng, int(rng.choice([1, 3, 8, 17])), heads * step)
    arrays = [*LEFT[kind](x, name), packed(rng, name, width, columns)]
    attrs = {"format": name, "heads": heads, "columns": columns, "width": width}
    return Case(f"{kind}_head_linear", arrays, attrs, tuple(range(len(arrays) - 1)))


def _latent_rows(rng: Rng) -> Case:
    heads, size, turned = int(rng.integers(1, 6)), int(rng.integers(1, 80)), 2 * int(rng.integers(1, 20))
    widths = heads * size, (heads + 1) * turned, size
    rows = int(rng.choice([1, 3, 17]))
    arrays = [floats(rng, rows, width) for width in widths]
    return Case("latent_rows", arrays, {"heads": heads}, (0, 1, 2))


LATENT_CASES: dict[str, Callable[[np.random.Generator], Case]] = {
    "packed_head_linear": lambda rng: head_linear_case(rng, "packed"),
    "bf16_head_linear": lambda rng: head_linear_case(rng, "bf16"),
    "i8_head_linear": lambda rng: head_linear_case(rng, "i8"),
    "latent_rows": _latent_rows,
}
