"""Rows of the op table for mixtures of experts. Letters as in compiler/meaning/experts.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmc.compiler.meaning import experts as meaning
from llmc.compiler.ops.op import Attr, Op, Result

_PACKED = ("format", "experts", "width")
_MIXTRAL = "https://arxiv.org/abs/2401.04088 section 2.1"


def _in(shapes: list[Any], attrs: dict[str, Attr]) -> Result:
    *_, ids, weight = shapes
    return [((ids[0], ids[1] * (int(weight[0]) // int(attrs["experts"]))), "float32")]


def _out(shapes: list[Any], attrs: dict[str, Attr]) -> Result:
    return [((shapes[0][0], int(shapes[-1][0]) // int(attrs["experts"])), "float32")]


def _packed_in(shapes: list[Any], attrs: dict[str, Attr]) -> Result:
    return [((shapes[-2][0], shapes[-2][1] * int(attrs["width"])), "float32")]


def _packed_out(shapes: list[Any], attrs: dict[str, Attr]) -> Result:
    return [((shapes[0][0], int(attrs["width"])), "float32")]


_LEFT = {
    "packed": (("x",), "x float32"),
    "bf16": (("x",), "x bfloat16 pairs (round_rows)"),
    "i8": (("codes", "scales", "totals"), "x as quantize_rows gives it"),
}

_PLAIN = (
    Op(
        "route",
        ("logits", "bias"),
        ("used", "routing", "renormalize", "scale", "groups", "groups_used", "tolerance"),
        lambda s, a: [((s[0][0], int(a["used"])), "int32"), ((s[0][0], int(a["used"])), "float32")],
        meaning.route,
        "logits (M, E), bias (E,) for choosing -> ids (M, U = used) of the best, ascending, of equals the lower "
        "ones, and weights (M, U); spec/blocks.py Experts says what the attributes mean",
        f"{_MIXTRAL}; groups and bias https://arxiv.org/abs/2412.19437 section 2.1.2; sparse_mixer "
        "https://arxiv.org/abs/2409.12136",
    ),
    Op(
        "gate_rows",
        ("x", "gate"),
        (),
        lambda s, a: [(s[0], "float32")],
        meaning.gate_rows,
        "x (M, C) * sigmoid(gate (M, N)), each of N equal slices of a row by its own -> (M, C)",
        "https://qwenlm.github.io/blog/qwen-moe, the shared expert; of heads https://arxiv.org/abs/2505.06708",
    ),
    Op(
        "experts_bias",
        ("x", "ids", "bias"),
        ("experts",),
        lambda s, a: [(s[0], "float32")],
        meaning.experts_bias,
        "slice u of x[m] plus slice ids[m, u] of bias: x (M, U F), bias (E F,) -> (M, U F)",
        "https://arxiv.org/abs/2508.10925",
    ),
    Op(
        "experts_out_bias",
        ("x", "ids", "weights", "bias"),
        ("experts",),
        lambda s, a: [(s[0], "float32")],
        meaning.experts_out_bias,
        "x[m] plus the sum over u of weights[m, u] times slice ids[m, u] of bias: x (M, C), bias (E C,) -> (M, C)",
        "https://arxiv.org/abs/2508.10925",
    ),
    Op(
        "experts_in",
        ("x", "ids", "weight"),
        ("experts",),
        _in,
        meaning.experts_in,
        "slice u of row m is weight's matrix ids[m, u] times x[m]: x (M, C), weight (E F, C) -> (M, U F)",
        _MIXTRAL,
    ),
    Op(
        "experts_out",
        ("x", "ids", "weights", "weight"),
        ("experts",),
        _out,
        meaning.experts_out,
        "sum over u of weights[m, u] times matrix ids[m, u] times slice u of x[m]: x (M, U F), weight (E C, F) -> "
        "(M, C)",
        _MIXTRAL,
    ),
)


def _packed() -> Iterator[Op]:
    """The rows over packed weights, for each form of the activations."""
    for kind, (left, words) in _LEFT.items():
        for way, result, more in (("in", _packed_in, ()), ("out", _packed_out, ("weights",))):
            name = f"{kind}_experts_{way}"
            what = f"experts_{way} with weight packed, {words}; one expert's matrix has `width` rows"
            operands = (*left, "ids", *more, "weight")
            yield Op(name, operands, _PACKED, result, getattr(meaning, name), what, "compiler/formats/")


ROWS = (*_PLAIN, *_packed())
