"""Rows of the op table for latent attention. Letters as in compiler/meaning/latent.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmc.compiler.meaning import latent as meaning
from llmc.compiler.ops.op import Attr, Op, Result

_SOURCE = "https://arxiv.org/abs/2405.04434 section 2.1"


def _rows(shapes: list[Any], attrs: dict[str, Attr]) -> Result:
    (rows, _), (_, turned), (_, size) = shapes
    heads = int(attrs["heads"])
    return [((rows, (heads + 2) * (int(size) + int(turned) // (heads + 1))), "float32")]


_PLAIN = (
    Op(
        "head_linear",
        ("x", "weight"),
        ("heads",),
        lambda s, a: [((s[0][0], s[1][0]), "float32")],
        meaning.head_linear,
        "each head's matrix times the first K of its own columns: x (M, H S), weight (H N, K), K <= S -> (M, H N)",
        f"{_SOURCE}.2, the matrices that are absorbed",
    ),
    Op(
        "latent_rows",
        ("q", "rotated", "latent"),
        ("heads",),
        _rows,
        meaning.latent_rows,
        "attention's rows where all heads share one key, which is the value too: q (M, H L), rotated (M, (H + 1) P), "
        "latent (M, L) -> (M, (H + 2) (L + P)): q and rotated part of each head, latent and rotated part of the key, "
        "latent and zeros for the value",
        f"{_SOURCE}.3",
    ),
)

_LEFT = {
    "packed": (("x",), "x float32"),
    "bf16": (("x",), "x bfloat16 pairs (round_rows)"),
    "i8": (("codes", "scales", "totals"), "x as quantize_rows gives it, S and K multiples of 64"),
}


def _packed() -> Iterator[Op]:
    """head_linear over packed weights, for each form of the activations."""
    for kind, (left, words) in _LEFT.items():
        name = f"{kind}_head_linear"
        yield Op(
            name,
            (*left, "weight"),
            ("format", "heads", "columns", "width"),
            lambda s, a: [((s[0][0], int(a["width"])), "float32")],
            getattr(meaning, name),
            f"head_linear with weight packed, {words}; width = H N, columns = K",
            "compiler/formats/",
        )


ROWS = (*_PLAIN, *_packed())
