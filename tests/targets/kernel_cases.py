"""Random inputs for every op, and a runner that compares its kernel on a target with its NumPy meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, to_bf16
from llmc.compiler.ops import OPS
from llmc.targets.build import compile_kernels
from llmc.targets.lower import make_kernel
from llmc.targets.target import Target

Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """Operands and attributes of one call; `symbolic` are the operands whose first size is unknown to the kernel."""

    op: str
    arrays: list[np.ndarray]
    attrs: dict[str, Any]
    symbolic: tuple[int, ...]


def _floats(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _rows(rng: Rng) -> int:
    return int(rng.choice([1, 2, 3, 4, 7, 8, 13, 17, 40]))


def _width(rng: Rng) -> int:
    """Any width, and often one that ends on or inside a block of 32, a record of 64 or a register of 16."""
    return int(rng.choice([int(rng.integers(1, 150)), 16, 32, 33, 64, 96, 128]))


def _row_case(
    op: str,
    make: Callable[[Rng, int, int], tuple[list[np.ndarray], dict[str, Any], tuple[int, ...]]],
) -> Any:
    def case(rng: Rng) -> Case:
        arrays, attrs, symbolic = make(rng, _rows(rng), _width(rng))
        return Case(op, arrays, attrs, symbolic)

    return case


def _rope(rng: Rng) -> Case:
    heads, size, rows = int(rng.integers(1, 6)), 2 * int(rng.integers(1, 50)), _rows(rng)
    attrs = {
        "rotated_heads": int(rng.integers(0, heads + 1)), "head_dim": size,
        "layout": str(rng.choice(["half", "interleaved"])),
    }  # fmt: skip
    return Case("rope", [_floats(rng, rows, heads * size), _floats(rng, rows, size)], attrs, (0, 1))


def _attention(rng: Rng) -> Case:
    """Several sequences: each with some tokens already in its pages and some rows of this step."""
    groups, per_group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 8, 11]))
    size, heads = int(rng.choice([10, 16, 20, 64, 80])), groups * per_group
    lengths = [(int(rng.integers(0, 40)), int(rng.integers(1, 25))) for _ in range(int(rng.integers(1, 4)))]
    pages_of = [-(-(past + new) // 16) for past, new in lengths]
    ids = rng.permutation(sum(pages_of) + 2)[: sum(pages_of)].astype(np.int32)
    indptr = np.cumsum([0, *pages_of]).astype(np.int32)
    seqs = np.concatenate([np.full(new, s) for s, (_, new) in enumerate(lengths)]).astype(np.int32)
    slots = np.concatenate([np.arange(past, past + new) for past, new in lengths]).astype(np.int32)
    kind = str(rng.choice(["f32", "bf16"]))
    kv = _floats(rng, sum(pages_of) + 2, 2, groups, 16 * size)
    attrs = {
        "heads": heads,
        "kv_heads": groups,
        "head_dim": size,
        "scale": size**-0.5,
        "kv_dtype": kind,
    }
    qkv = _floats(rng, len(seqs), (heads + 2 * groups) * size)
    arrays = [qkv, to_bf16(kv) if kind == "bf16" else kv, seqs, slots, indptr, ids]
    return Case("attention", arrays, attrs, (0, 1, 2, 3, 4, 5))


def _take_rows(rng: Rng) -> Case:
    rows = _rows(rng)
    picked = rng.integers(0, rows, _rows(rng)).astype(np.int32)
    return Case("take_rows", [_floats(rng, rows, _width(rng)), picked], {}, (0, 1))


def _embedding(rng: Rng) -> Case:
    vocab, width, name = int(rng.integers(1, 60)), _width(rng), str(rng.choice(list(FORMATS)))
    ids = rng.integers(0, vocab, _rows(rng)).astype(np.int32)
    table = FORMATS[name].pack(_floats(rng, vocab, width))
    return Case("packed_embedding", [ids, table], {"format": name, "width": width}, (0,))


def _linear(op: str, activation: str) -> Any:
    left = {
        "f32": lambda x: (x,),
        "bf16": lambda x: (meaning.round_rows(x),),
        "i8": meaning.quantize_rows,
    }[activation]

    def case(rng: Rng) -> Case:
        name = str(rng.choice([f.name for f in FORMATS.values() if f.activation == activation]))
        outputs, width = int(rng.choice([1, 5, 16, 33, 64])), _width(rng)
        x = left(_floats(rng, _rows(rng) if rng.random() < 0.9 else 260, width))
        weight = FORMATS[name].pack(_floats(rng, outputs, width))
        return Case(op, [*x, weight], {"format": name, "width": outputs}, tuple(range(len(x))))

    return case


CASES: dict[str, Callable[[Rng], Case]] = {
    "rms_norm": _row_case("rms_norm", lambda r, m, c: ([_floats(r, m, c), _floats(r, c)], {"eps": 1e-5}, (0,))),
    "add_rms_norm": _row_case(
        "add_rms_norm",
        lambda r, m, c: (
            [_floats(r, m, c), _floats(r, m, c), _floats(r, c)],
            {"eps": 1e-6},
            (0, 1),
        ),
    ),
    "rope_table": _row_case(
        "rope_table",
        lambda r, m, c: (
            [r.integers(0, 3000, m).astype(np.int32), r.random(c).astype(np.float32)],
            {},
            (0,),
        ),
    ),
    "gated": _row_case("gated", lambda r, m, c: ([20 * _floats(r, m, 2 * c)], {"activation": "silu"}, (0,))),
    "argmax": _row_case("argmax", lambda r, m, c: ([_floats(r, m, c).round(1)], {}, (0,))),
    "round_rows": _row_case("round_rows", lambda r, m, c: ([_floats(r, m, c)], {}, (0,))),
    "quantize_rows": _row_case("quantize_rows", lambda r, m, c: ([_floats(r, m, c)], {}, (0,))),
    "rope": _rope,
    "attention": _attention,
    "take_rows": _take_rows,
    "packed_embedding": _embedding,
    "packed_linear": _linear("packed_linear", "f32"),
    "bf16_linear": _linear("bf16_linear", "bf16"),
    "i8_linear": _linear("i8_linear", "i8"),
}

# Relative to the greatest output. Sums of up to 150 products in float32, in another order than NumPy's.
TOLERANCE = 3e-6


def run(case: Case, target: Target) -> None:
    """Compile the kernel for the case's shapes, run it on poisoned outputs, compare with the meaning."""
    copies = [array.copy() for array in case.arrays]
    expected = OPS[case.op].meaning(*copies, **case.attrs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    names: dict[int, Any] = {}

    def shape(array: np.ndarray, first_is_symbolic: bool) -> list[Any]:
        sizes: list[Any] = list(array.shape)
        if first_is_symbolic:
            sizes[0] = names.setdefault(sizes[0], tirx.Var(f"n{sizes[0]}", "int64"))
        return sizes

    shapes = [shape(array, i in case.symbolic) for i, array in enumerate(case.arrays)]
    shapes += [shape(array, array.shape[0] in names) for array in expected]
    kernel = compile_kernels({"kernel": make_kernel(case.op, target, shapes, case.attrs)}, target)["kernel"]
    inputs = [_fenced(array) for array in case.arrays]
    outputs = [tvm.runtime.tensor(np.full(array.shape, 77, array.dtype)) for array in expected]
    kernel(*inputs, *outputs)
    for got, wanted in zip(outputs, expected, strict=True):
        compare(case, got.numpy(), wanted)
    for got, wanted in zip(inputs, copies, strict=True):  # pages are written in place; all else is left alone
        np.testing.assert_array_equal(got.numpy(), wanted, err_msg=f"{case.op}: an operand differs")


def _fenced(array: np.ndarray) -> tvm.runtime.Tensor:
    """The array in memory aligned to 64 bytes, followed by NaNs: what reads past its end computes nonsense."""
    room = -(-array.nbytes // 64) * 64 + 4096
    memory = np.full(room + 64, 0xFF, np.uint8)  # 0xFFFFFFFF is a NaN, and -1
    start = -memory.ctypes.data % 64
    inside = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    inside[...] = array
    return tvm.runtime.from_dlpack(inside)


def compare(case: Case, got: np.ndarray, wanted: np.ndarray) -> None:
    """Integers must be equal, floats close relative to the greatest one."""
    where = f"{case.op} {[a.shape for a in case.arrays]} {case.attrs}"
    if got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, wanted, err_msg=where)
        return
    scale = max(float(np.abs(wanted).max()), 1e-6)
    np.testing.assert_allclose(got / scale, wanted / scale, rtol=0, atol=TOLERANCE, err_msg=where)
