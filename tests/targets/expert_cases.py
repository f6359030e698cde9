"""Random inputs for the ops of experts, as kernel_cases.py has them for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from kernel_cases import Case, Rng, packed

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, BlockFormat


def route(rng: Rng, **attrs: Any) -> Case:
    """Groups are even; a row chooses no more than the open ones have."""
    groups = int(rng.choice([1, 1, 2, 4]))
    size = int(rng.choice([2, 3, 8, 33]))
    used_groups = int(rng.integers(1, groups + 1))
    attrs = {
        "used": int(rng.integers(1, min(9, size * used_groups + 1))),
        "routing": str(rng.choice(["softmax", "sigmoid", "softmax_of_chosen"])),
        "renormalize": int(rng.integers(0, 2)), "scale": float(rng.choice([1, 2.5])),
        "groups": groups, "groups_used": used_groups, **attrs,
    }  # fmt: skip
    rows, count = int(rng.choice([1, 2, 7, 17, 40])), groups * size
    logits = 2 * rng.standard_normal((rows, count)).astype(np.float32)
    bias = rng.standard_normal(count).astype(np.float32) * np.float32(rng.choice([0, 0.2]))
    return Case("route", [logits, bias], attrs, (0,))


def gate_rows(rng: Rng) -> Case:
    """Gates from next to nothing to next to all."""
    rows, width = int(rng.choice([1, 3, 17])), int(rng.choice([1, 16, 33, 64]))
    x, gate = rng.standard_normal((rows, width)), 30 * rng.standard_normal((rows, 1))
    return Case("gate_rows", [x.astype(np.float32), gate.astype(np.float32)], {}, (0, 1))


LEFT = {
    "packed": lambda x: (x,),
    "bf16": lambda x: (meaning.round_rows(x),),
    "i8": meaning.quantize_rows,
}


def experts(rng: Rng, op: str, format: str) -> Case:
    """Rows through some experts each, the same one twice among them."""
    kind, _, way = op.split("_")
    rows, used, count = int(rng.choice([1, 3, 9, 40, 150])), int(rng.integers(1, 5)), int(rng.choice([2, 5]))
    long = format.endswith("_k")
    inner = 256 if long else int(rng.choice([64, 128] if kind == "i8" and way == "out" else [16, 48, 64, 112]))
    width = int(rng.choice([16, 48]))
    x = rng.standard_normal((rows, inner * (used if way == "out" else 1))).astype(np.float32)
    left = LEFT[kind](x)
    ids = rng.integers(0, count, (rows, used)).astype(np.int32)
    shares = [rng.random((rows, used)).astype(np.float32)] if way == "out" else []
    weight = packed(rng, format, count * width, inner)
    attrs = {"format": format, "experts": count, "width": width}
    return Case(op, [*left, ids, *shares, weight], attrs, tuple(range(len(left) + 1 + len(shares))))


def any_experts(op: str) -> Callable[[Rng], Case]:
    """Cases with any format that the op takes."""
    kind = op.split("_")[0]
    formats = {"packed": ["f32", *BLOCK_FORMATS], "bf16": ["bf16"], "i8": BLOCK_FORMATS}[kind]
    return lambda rng: experts(rng, op, str(rng.choice(formats)))


BLOCK_FORMATS = [name for name, format in FORMATS.items() if isinstance(format, BlockFormat)]
EXPERT_CASES: dict[str, Callable[[Rng], Case]] = {"route": route, "gate_rows": gate_rows} | {
    op: any_experts(op) for op in (f"{kind}_experts_{way}" for kind in LEFT for way in ("in", "out"))
}
