"""Random inputs for every op, and a runner that compares its kernel on a target with its NumPy meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, ROTATED, BlockFormat, Quantized, block_format, ceil_to, encode
from llmc.compiler.ops import OPS
from llmc.targets.build import compile_kernels
from llmc.targets.lower import make_kernel
from llmc.targets.target import Target

Rng = np.random.Generator


# Relative to the greatest output. Sums of up to 150 products in float32, in another order than NumPy's.
TOLERANCE = 3e-6


@dataclass(frozen=True)
class Case:
    """Operands and attributes of one call; `symbolic` are the operands whose first size is unknown to the kernel."""

    op: str
    arrays: list[np.ndarray]
    attrs: dict[str, Any]
    symbolic: tuple[int, ...]
    tolerance: float = TOLERANCE


def floats(rng: Rng, *shape: int) -> np.ndarray:
    """Normal numbers."""
    return rng.standard_normal(shape).astype(np.float32)


ROWS = (1, 2, 3, 7, 9, 12, 13, 14, 16, 17, 40)  # in groups of 1 to 14; few enough for one thread, and more


def fixed(case: Case) -> Case:
    """The same case, its number of rows known to the kernel."""
    return replace(case, symbolic=())


def _width(rng: Rng) -> int:
    """Any width, and often one that ends on or inside a block of 32, a record of 64 or a register of 16."""
    return int(rng.choice([int(rng.integers(1, 150)), 7, 33, 64, 83, 96]))


def _row_case(
    op: str,
    make: Callable[[Rng, int, int], tuple[list[np.ndarray], dict[str, Any], tuple[int, ...]]],
) -> Any:
    def case(rng: Rng) -> Case:
        arrays, attrs, symbolic = make(rng, ROWS[-1], _width(rng))
        return Case(op, arrays, attrs, symbolic)

    return case


def _rope(rng: Rng) -> Case:
    """All of each head rotated, or its first numbers, or some in the middle, also of heads of an odd size."""
    heads, turned, rows = int(rng.integers(1, 6)), 2 * int(rng.integers(1, 50)), ROWS[-1]
    first = int(rng.choice([0, 0, 3, 32]))
    size = first + turned + int(rng.choice([0, 0, 1, 2, 16, 31, 48]))
    attrs = {
        "rotated_heads": int(rng.integers(0, heads + 1)), "head_dim": size, "first": first,
        "layout": str(rng.choice(["half", "interleaved"])),
    }  # fmt: skip
    return Case("rope", [floats(rng, rows, heads * size), floats(rng, rows, turned)], attrs, (0, 1))


def qk_norm(rng: Rng, kind: str = "", span: str = "") -> Case:
    """Heads of q, k and v, around one half: around 0 the mean that layer norm takes off would be next to none."""
    heads, groups, size = int(rng.integers(1, 6)), int(rng.integers(1, 4)), _width(rng)
    kind, span = kind or str(rng.choice(["rms", "layer"])), span or str(rng.choice(["head", "heads", "all"]))
    attrs = {"heads": heads, "kv_heads": groups, "head_dim": size, "eps": 1e-6, "kind": kind, "span": span}
    qkv = floats(rng, ROWS[-1], (heads + 2 * groups) * size) + np.float32(0.5)
    sizes = (size, size) if span == "head" else (heads * size, groups * size)
    return Case("qk_norm", [qkv, *(floats(rng, n) for n in sizes)], attrs, (0,))


def _layer_norm(rng: Rng, op: str) -> Case:
    rows, width = ROWS[-1], _width(rng)
    inputs = [floats(rng, rows, width) + np.float32(0.5) for _ in range({"layer_norm": 1, "add_layer_norm": 2}[op])]
    arrays = [*inputs, floats(rng, width), floats(rng, width)]
    return Case(op, arrays, {"eps": 1e-5}, tuple(range(len(inputs))))


def activation_case(rng: Rng, op: str, name: str = "") -> Case:
    """Numbers about 1 and about 20 in size."""
    width = _width(rng) * {"activate": 1, "gated": 2}[op]
    x = np.float32(rng.choice([1, 20])) * floats(rng, ROWS[-1], width)
    return Case(op, [x], {"activation": name or str(rng.choice(list(meaning.ACTIVATIONS)))}, (0,))


def _bounded_gated(rng: Rng) -> Case:
    """Limits that many numbers are beyond."""
    attrs = {"limit": float(rng.choice([0.5, 7])), "plus": float(rng.choice([0, 1]))}
    case = activation_case(rng, "gated")
    return Case("bounded_gated", case.arrays, case.attrs | attrs, (0,))


def _grow_queries(rng: Rng) -> Case:
    """Positions in spans of 16 tokens, some beyond the last one."""
    rows, width = int(rng.choice(ROWS)), _width(rng)
    arrays = [floats(rng, rows, width), rng.integers(0, 100, rows).astype(np.int32), floats(rng, 5)]
    return Case("grow_queries", arrays, {"columns": int(rng.integers(1, width + 1)), "tokens": 16}, (0, 1))


def _take_rows(rng: Rng) -> Case:
    rows = 11  # not in ROWS: `run_rows` would take rows away that are picked
    picked = rng.integers(0, rows, int(rng.choice(ROWS))).astype(np.int32)
    return Case("take_rows", [floats(rng, rows, _width(rng)), picked], {}, (0, 1))


def _take_columns(rng: Rng) -> Case:
    width = _width(rng)
    first = int(rng.integers(0, width))
    attrs = {"first": first, "count": int(rng.integers(1, width - first + 1))}
    return Case("take_columns", [floats(rng, ROWS[-1], width)], attrs, (0,))


def _rotate_rows(rng: Rng) -> Case:
    """Some of the columns, as of an embedding, or all there are with zeros added, as in front of a matrix: the bits."""
    columns = _width(rng)
    attrs = {"width": int(rng.choice([columns, ceil_to(columns, ROTATED)]))}
    return Case("rotate_rows", [floats(rng, ROWS[-1], columns)], attrs, (0,), tolerance=0)


def _own_ids(rng: Rng) -> Case:
    """Ids of rows, or of the experts that they use."""
    shape = (ROWS[-1],) if rng.integers(2) else (ROWS[-1], int(rng.integers(1, 5)))
    attrs = {"first": int(rng.integers(0, 40)), "count": int(rng.integers(1, 40))}
    return Case("own_ids", [rng.integers(0, 60, shape).astype(np.int32)], attrs, (0,))


def _top(rng: Rng) -> Case:
    """Rows with many equal numbers, in any order, narrower than what is asked for and much wider."""
    x = floats(rng, ROWS[-1], int(rng.choice([1, 40, 64, 65, 130, 5000])))
    x[::3] = x[::3].round(int(rng.integers(0, 3)))
    x[1::5] = np.sort(x[1::5])
    x[2::7] = 3
    return Case("top", [4 * x], {}, (0,))


def packed(rng: Rng, name: str, rows: int, columns: int, code: int | None = None) -> np.ndarray:
    """A packed matrix: any codes, or `code`, and any scales of a format, also those its quantizer would not choose."""
    format = FORMATS[name]
    if not isinstance(format, BlockFormat):
        return format.pack(floats(rng, rows, columns))
    width = ceil_to(columns, format.columns)
    blocks, records = width // format.block, width // format.columns
    codes = rng.integers(0, format.top + 1, (rows, width // (2 if format.pair else 1))).astype(np.uint8)
    if code is not None:
        codes[:] = code
    most = 16 if format.sub_bits == 4 else 128
    tables = {
        "scale": (rows, records if format.scale == "super" else blocks),
        "minimum": (rows, records if format.scale == "super" else blocks),
        "zero": (rows, blocks),
    }
    found = {key: floats(rng, *shape).astype(np.float16) for key, shape in tables.items()}
    found["row_scale"] = floats(rng, rows)
    found["sub_scale"] = rng.integers(0 if most == 16 else -128, most, (rows, blocks)).astype(np.int8)
    found["sub_minimum"] = rng.integers(0, most, (rows, blocks)).astype(np.uint8)
    used = {"f16": ["scale"], "super": ["scale", "sub_scale"], "row": ["row_scale", "sub_scale"]}[format.scale]
    if isinstance(format.offset, str):
        used += [format.offset, "sub_minimum"] if format.scale == "super" else [format.offset]
    return encode(format, Quantized(codes, {key: found[key] for key in used}), rows, columns)


def _format_width(rng: Rng, name: str) -> int:
    """Formats with long records only ever hold widths that fill them."""
    format = FORMATS[name]
    long = isinstance(format, BlockFormat) and format.columns > 64
    return 256 * int(rng.integers(1, 3)) if long else _width(rng)


def embedding_case(rng: Rng, name: str) -> Case:
    """A look-up in a table of this format, of ids that are nobody's too."""
    vocab, width = int(rng.integers(1, 60)), _format_width(rng, name)
    ids = rng.integers(-1, vocab, ROWS[-1]).astype(np.int32)
    return Case("packed_embedding", [ids, packed(rng, name, vocab, width)], {"format": name, "width": width}, (0,))


def linear_case(rng: Rng, op: str, name: str, rows: int = 260) -> Case:
    """A linear layer with a weight of this format; 260 rows are two blocks and a half."""
    left = {
        "packed_linear": lambda x: (x,),
        "bf16_linear": lambda x: (meaning.round_rows(x),),
        "i8_linear": lambda x: meaning.left_of(block_format(name), x),
    }[op]
    outputs, width = int(rng.choice([1, 5, 16, 33, 64])), _format_width(rng, name)
    x = left(floats(rng, rows, width))
    weight = packed(rng, name, outputs, width)
    return Case(op, [*x, weight], {"format": name, "width": outputs}, tuple(range(len(x))))


def greatest_case(rng: Rng, name: str, least: bool = False) -> Case:
    """Dots as great as the format has them, of both signs: the greatest code, and activations of 127 and of -127.

    Or the least code, which stands for as much where zero is in the middle.
    """
    format = block_format(name)
    codes = np.arange(format.top + 1) if format.values is None else format.values.reshape(len(format.values), -1).sum(1)
    x = np.repeat(np.array([[1.0], [-1.0]], np.float32), 512, axis=1)
    x = meaning.rotate_rows(x, 512) if format.rotated else x
    weight = packed(rng, name, 16, 512, int(np.argmin(codes) if least else np.argmax(codes)))
    left = meaning.left_of(format, x)
    # Scales and offsets cancel in some outputs; a sum that does not fit would be off by far more.
    return Case("i8_linear", [*left, weight], {"format": name, "width": 16}, (), tolerance=1e-4)


BLOCK_FORMATS = [name for name, format in FORMATS.items() if isinstance(format, BlockFormat)]
# One of each kind of codes, scales and offsets: for tests of what reads weights as others do.
FEW_FORMATS = ("q8", "q5", "q4", "q3h", "c4", "c2h", "r8", "r4", "q4_0", "q4_k", "q6_k", "iq2_xxs", "nvfp4", "nf4")
TURNS = {name: number % 2 for number, name in enumerate(BLOCK_FORMATS)}  # which half it is of, where a test takes one


def _any_of(make: Callable[[Rng, str], Case], names: list[str]) -> Callable[[Rng], Case]:
    return lambda rng: make(rng, str(rng.choice(names)))


CASES: dict[str, Callable[[Rng], Case]] = {
    "rms_norm": _row_case("rms_norm", lambda r, m, c: ([floats(r, m, c), floats(r, c)], {"eps": 1e-5}, (0,))),
    "add_rms_norm": _row_case(
        "add_rms_norm",
        lambda r, m, c: (
            [floats(r, m, c), floats(r, m, c), floats(r, c)],
            {"eps": 1e-6},
            (0, 1),
        ),
    ),
    "layer_norm": lambda rng: _layer_norm(rng, "layer_norm"),
    "add_layer_norm": lambda rng: _layer_norm(rng, "add_layer_norm"),
    "rope_table": _row_case(
        "rope_table",
        lambda r, m, c: (
            [r.integers(0, 3000, m).astype(np.int32), r.random(c).astype(np.float32)],
            {"magnitude": float(r.choice([1, 0.7, 1.2]))},
            (0,),
        ),
    ),
    "activate": lambda rng: activation_case(rng, "activate"),
    "gated": lambda rng: activation_case(rng, "gated"),
    "bounded_gated": _bounded_gated,
    "xielu": _row_case(
        "xielu", lambda r, m, c: ([5 * floats(r, m, c), abs(floats(r, 1)), abs(floats(r, 1))], {}, (0,))
    ),
    "scale": _row_case("scale", lambda r, m, c: ([floats(r, m, c)], {"factor": float(r.random())}, (0,))),
    "clip": _row_case("clip", lambda r, m, c: ([floats(r, m, c)], {"bound": float(r.random()) + 0.1}, (0,))),
    "soft_cap": _row_case(
        "soft_cap", lambda r, m, c: ([30 * floats(r, m, c)], {"cap": float(r.choice([0.5, 30, 3e4]))}, (0,))
    ),
    "qk_norm": qk_norm,
    "argmax": _row_case("argmax", lambda r, m, c: ([floats(r, m, c).round(1)], {}, (0,))),
    "top": _top,
    "round_rows": _row_case("round_rows", lambda r, m, c: ([floats(r, m, c)], {}, (0,))),
    "rotate_rows": _rotate_rows,
    "quantize_rows": _row_case("quantize_rows", lambda r, m, c: ([floats(r, m, c)], {}, (0,))),
    "quantize_rotated": _row_case("quantize_rotated", lambda r, m, c: ([floats(r, m, c)], {}, (0,))),
    "rope": _rope,
    "sinusoid": _row_case(
        "sinusoid",
        lambda r, m, c: (
            [r.integers(0, 3000, m).astype(np.int32), r.random(c).astype(np.float32)],
            {"offset": int(r.choice([0, 2]))},
            (0,),
        ),
    ),
    "grow_queries": _grow_queries,
    "take_rows": _take_rows,
    "take_columns": _take_columns,
    "own_ids": _own_ids,
    "packed_embedding": _any_of(embedding_case, ["f32", "bf16", "q8", "q4"]),
    "packed_linear": _any_of(lambda rng, name: linear_case(rng, "packed_linear", name), ["f32", "q8"]),
    "bf16_linear": _any_of(lambda rng, name: linear_case(rng, "bf16_linear", name), ["bf16"]),
    "i8_linear": _any_of(lambda rng, name: linear_case(rng, "i8_linear", name), ["q8", "q4"]),
}


def run(case: Case, target: Target) -> list[np.ndarray]:
    """Compile the kernel for the case's shapes, run it on poisoned outputs, compare with the meaning."""
    copies = [array.copy() for array in case.arrays]
    expected = OPS[case.op].meaning(*copies, **case.attrs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    inputs = [fenced(array) for array in case.arrays]
    outputs = _call(case, inputs, expected, target)
    for got, wanted in zip(outputs, expected, strict=True):
        compare(case, got, wanted)
    for got, wanted in zip(inputs, copies, strict=True):  # pages are written in place; all else is left alone
        np.testing.assert_array_equal(got.numpy(), wanted, err_msg=f"{case.op}: an operand differs")
    return outputs


def run_rows(case: Case, target: Target) -> None:
    """`run`, then the first rows alone, in the same kernel: the same bits. For ops that go row by row."""
    outputs = run(case, target)
    if len({len(case.arrays[i]) for i in case.symbolic}) > 1:
        return
    for rows in ROWS[:-1]:
        arrays = [a[:rows].copy() if i in case.symbolic else a for i, a in enumerate(case.arrays)]
        fewer = [output[:rows] for output in outputs]
        for got, wanted in zip(result(replace(case, arrays=arrays), target, tuple(fewer)), fewer, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=f"{case.op}: the first {rows} rows {case.attrs}")


def result(case: Case, target: Target, like: tuple[np.ndarray, ...] = ()) -> list[np.ndarray]:
    """What the kernel of an op gives, whose outputs are `like` these, or else like its first operand."""
    return _call(case, [fenced(array) for array in case.arrays], like or (case.arrays[0],), target)


def _call(
    case: Case, inputs: list[tvm.runtime.Tensor], like: tuple[np.ndarray, ...], target: Target
) -> list[np.ndarray]:
    """The outputs, of the shapes and dtypes of `like`."""
    names: dict[int, str] = {}

    def shape(array: np.ndarray, first_is_symbolic: bool) -> tuple[int | str, ...]:
        first, *rest = array.shape
        return (names.setdefault(first, f"n{len(names)}") if first_is_symbolic else first, *rest)

    shapes = [shape(array, i in case.symbolic) for i, array in enumerate(case.arrays)]
    shapes += [shape(array, array.shape[0] in names) for array in like]
    kernel = _compiled(case.op, tuple(shapes), tuple(case.attrs.items()), target)
    outputs = [tvm.runtime.tensor(np.full(array.shape, 77, array.dtype)) for array in like]
    kernel(*inputs, *outputs)
    return [output.numpy() for output in outputs]


@lru_cache(maxsize=4)
def _compiled(op: str, shapes: tuple[tuple[int | str, ...], ...], attrs: tuple[Any, ...], target: Target) -> Any:
    """The kernel for these sizes, of which those with a name are symbolic."""
    sizes: dict[str, Any] = {}

    def size(value: int | str) -> Any:
        return sizes.setdefault(value, tirx.Var(value, "int64")) if isinstance(value, str) else value

    made = make_kernel(op, target, [[size(value) for value in shape] for shape in shapes], dict(attrs))
    return compile_kernels({"kernel": made}, target)["kernel"]


def fenced(array: np.ndarray) -> tvm.runtime.Tensor:
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
    np.testing.assert_allclose(got / scale, wanted / scale, rtol=0, atol=case.tolerance, err_msg=where)
