"""Random inputs for the ops of experts, as kernel_cases.py has them for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from kernel_cases import ROWS, Case, Rng, packed

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, BlockFormat, block_format


def route(rng: Rng, **attrs: Any) -> Case:
    """Groups are even; a row chooses no more than the open ones have."""
    groups = int(rng.choice([1, 1, 2, 4]))
    size = int(rng.choice([2, 3, 8, 33]))
    used_groups = int(rng.integers(1, groups + 1))
    attrs = {
        "used": int(rng.integers(1, min(9, size * used_groups + 1))),
        "routing": str(rng.choice(["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer"])),
        "renormalize": int(rng.integers(0, 2)), "scale": float(rng.choice([1, 2.5])),
        "groups": groups, "groups_used": used_groups, "tolerance": float(rng.choice([0.01, 0.4])), **attrs,
    }  # fmt: skip
    rows, count = ROWS[-1], groups * size
    logits = 2 * rng.standard_normal((rows, count)).astype(np.float32)
    bias = rng.standard_normal(count).astype(np.float32) * np.float32(rng.choice([0, 0.2]))
    return Case("route", [logits, bias], attrs, (0,))


def gate_rows(rng: Rng) -> Case:
    """Gates from next to nothing to next to all, of a row or of slices."""
    rows, width, count = ROWS[-1], int(rng.choice([1, 16, 33, 64])), int(rng.choice([1, 3]))
    x, gate = rng.standard_normal((rows, width * count)), 30 * rng.standard_normal((rows, count))
    return Case("gate_rows", [x.astype(np.float32), gate.astype(np.float32)], {}, (0, 1))


def experts_bias(rng: Rng, op: str) -> Case:
    """Biases of experts, of which a row may use one twice, or none in a place."""
    rows, used, count = ROWS[-1], int(rng.integers(1, 5)), int(rng.choice([2, 5]))
    width = int(rng.choice([1, 16, 33, 64]))
    x = rng.standard_normal((rows, width * (used if op == "experts_bias" else 1))).astype(np.float32)
    ids = rng.integers(-1, count, (rows, used)).astype(np.int32)
    shares = [rng.random((rows, used)).astype(np.float32)] if op == "experts_out_bias" else []
    bias = rng.standard_normal(count * width).astype(np.float32)
    return Case(op, [x, ids, *shares, bias], {"experts": count}, tuple(range(2 + len(shares))))


LEFT = {
    "packed": lambda x, _: (x,),
    "bf16": lambda x, _: (meaning.round_rows(x),),
    "i8": lambda x, format: meaning.left_of(block_format(format), x),
}


def experts(rng: Rng, op: str, format: str, rows: int = 150, inner: int = 0) -> Case:
    """Rows through some experts each, the same one twice and none among them; `inner` columns, 0: any."""
    kind, _, way = op.split("_")
    used, count = int(rng.integers(1, 5)), int(rng.choice([2, 5]))
    long = format.endswith("_k")
    inner = (
        inner or 256
        if long
        else inner or int(rng.choice([64, 128] if kind == "i8" and way == "out" else [16, 48, 64, 112]))
    )
    width = int(rng.choice([16, 48]))
    x = rng.standard_normal((rows, inner * (used if way == "out" else 1))).astype(np.float32)
    left = LEFT[kind](x, format)
    ids = np.sort(rng.integers(0, count, (rows, used)).astype(np.int32), axis=1)  # as route gives them
    ids[rng.random(ids.shape) < rng.choice([0, 0.5])] = -1  # as own_ids leaves them
    shares = [rng.random((rows, used)).astype(np.float32)] if way == "out" else []
    weight = packed(rng, format, count * width, inner)
    attrs = {"format": format, "experts": count, "width": width}
    return Case(op, [*left, ids, *shares, weight], attrs, tuple(range(len(left) + 1 + len(shares))))


def any_experts(op: str) -> Callable[[Rng], Case]:
    """Cases with a format that the op takes."""
    kind = op.split("_")[0]
    formats = {"packed": ["f32", "q8"], "bf16": ["bf16"], "i8": ["q8", "q4"]}[kind]
    return lambda rng: experts(rng, op, str(rng.choice(formats)))


BLOCK_FORMATS = [name for name, format in FORMATS.items() if isinstance(format, BlockFormat)]
EXPERT_CASES: dict[str, Callable[[Rng], Case]] = {
    "route": route,
    "gate_rows": gate_rows,
    "experts_bias": lambda rng: experts_bias(rng, "experts_bias"),
    "experts_out_bias": lambda rng: experts_bias(rng, "experts_out_bias"),
} | {op: any_experts(op) for op in (f"{kind}_experts_{way}" for kind in LEFT for way in ("in", "out"))}
