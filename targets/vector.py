"""Sixteen-lane vector pieces that kernels are built from, each in the best form a target's capabilities allow.

Every piece has a generic form (plain LLVM vector arithmetic, no intrinsic of one machine) and gives the same result on
every target unless its docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.narrow import byte_dot
from llmc.targets.target import Target

LANES = 16


def f32(value: float) -> Any:
    """A float32 constant."""
    return tirx.const(value, "float32")


def i32(value: int) -> Any:
    """An int32 constant."""
    return tirx.const(value, "int32")


def splat(value: Any) -> Any:
    """The scalar in all lanes."""
    return T.broadcast(value, LANES)


def lanes(start: Any) -> Any:
    """The index of sixteen neighbours from `start` on."""
    return T.ramp(start, 1, LANES)


def registers(shape: tuple[int, ...], dtype: str) -> Any:
    """A small fixed array that LLVM keeps in registers, or on the stack; never a run-time allocation.

    Without the annotation TVM's LowerTVMBuiltin turns it into a call of TVMBackendAllocWorkspace.
    """
    return T.alloc_local(shape, dtype, annotations={"disable_lower_builtin": True})


def held(x: Any, dtype: str = "float32", count: int = LANES) -> Any:
    """`count` lanes computed here, once, to be read several times."""
    out = registers((count,), dtype)
    place = T.ramp(0, 1, count)
    T.buffer_store(out, x, [place])
    return out[place]


@contextmanager
def imported(*functions: str) -> Iterator[None]:
    """A part of a kernel that may call these functions, LLVM's text."""
    with ExitStack() as stack:
        for text in functions:
            stack.enter_context(T.attr(i32(0), "pragma_import_llvm", text))
        yield


def prefetch(pointer: Any, far: bool = False) -> None:
    """Ask for the cache line of an address, `far` into the second-level cache only; never faults."""
    level = 2 if far else 3  # LLVM's locality: 3 is the first level
    T.evaluate(T.call_llvm_intrin("llvm.prefetch", pointer, i32(0), i32(level), i32(1), dtype="void"))


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32x16, the same bits whatever the loop around it looks like.

    Rounded once where the machine can, which is everywhere but in the oldest x86-64; there a call of the C library for
    each lane would take a hundred times as long, and it is rounded twice.
    """
    return T.call_llvm_pure_intrin("llvm.fmuladd", a, b, c, dtype="float32x16")


def reduce_max(x: Any) -> Any:
    """The greatest of sixteen float32 lanes, NaN left out: lane by lane, so it is slow."""
    return T.call_llvm_pure_intrin("llvm.vector.reduce.fmax", x, dtype="float32")


def greatest(x: Any) -> Any:
    """The greatest of sixteen float32 lanes in all of them, by halves; of lanes with NaN, any."""
    for distance in (8, 4, 2, 1):
        x = held(x)
        x = T.max(x, tirx.Shuffle([x], [i32(lane ^ distance) for lane in range(LANES)]))
    return held(x)


TOPS = 4  # lanes of what greatest_of_two gives


def greatest_of_two(one: Any, other: Any) -> Any:
    """The greatest of the lanes of each of two float32x16, in turns: (one's, other's, one's, other's)."""
    x = T.max(*_interleaved(one, other, 1))
    for distance in (2, 4, 8):
        x = held(x)
        x = T.max(x, tirx.Shuffle([x], [i32(lane ^ distance) for lane in range(LANES)]))
    return held(chosen(held(x), *range(TOPS)), "float32", TOPS)


def sums_of_four(parts: list[Any]) -> Any:
    """The sums of the lanes of each of four int32x16, int32x4."""
    low, high = (_sum(_interleaved(first, second, 1)) for first, second in (parts[:2], parts[2:]))
    x = _sum(_interleaved(low, high, 2))
    for width in (8, 4):
        x = T.vectorlow(f"int32x{width}", x) + T.vectorhigh(f"int32x{width}", x)
    return x


def _sum(pair: tuple[Any, Any]) -> Any:
    return held(pair[0] + pair[1], "int32")


def _interleaved(one: Any, other: Any, run: int) -> tuple[Any, Any]:
    """In each four lanes `run` lanes of one and as many of the other by turns: from their first two, and their last."""
    halves = []
    for first in (0, 2):
        order = [four + first + at + start for four in range(0, LANES, 4) for at, start in _TURNS[run]]
        halves.append(tirx.Shuffle([one, other], [i32(lane) for lane in order]))
    return halves[0], halves[1]


# Lanes of a run -> (lane of the two that are taken, where the vector that it is of begins).
_TURNS = {1: ((0, 0), (0, LANES), (1, 0), (1, LANES)), 2: ((0, 0), (1, 0), (0, LANES), (1, LANES))}


def chosen(x: Any, *numbers: int) -> Any:
    """Some lanes of a vector, in this order; of one lane, a scalar."""
    return tirx.Shuffle([x], [i32(number) for number in numbers])


def any_at_least(x: Any, bound: Any) -> Any:
    """Whether one of sixteen float32 lanes is not below the scalar; NaN is no such lane."""
    reached = T.Select(x >= splat(bound), splat(i32(1)), splat(i32(0)))
    return T.call_llvm_pure_intrin("llvm.vector.reduce.or", reached, dtype="int32") != 0


def reduce_sum(x: Any) -> Any:
    """The sum of sixteen float32 lanes, halves first (a fixed order)."""
    for width in (8, 4, 2):
        x = T.vectorlow(f"float32x{width}", x) + T.vectorhigh(f"float32x{width}", x)
    return tirx.Shuffle([x], [i32(0)]) + tirx.Shuffle([x], [i32(1)])


def dots_any_bytes(target: Target) -> bool:
    """Whether one instruction sums the products of 64 bytes, however great."""
    return target.has("avx512_vnni") and target.has("avx512f")


def dot4(target: Target, acc: Any, weights: Any, activations: Any, wide: bool) -> Any:
    """acc + sum over 4 of u8 weights (int32x16 words) * s8 activations (one int32 word), exact in int32x16.

    `wide`: weights may be above 127. For a part of a kernel that has `narrow.functions`.
    """
    if dots_any_bytes(target):
        return T.call_llvm_pure_intrin(
            "llvm.x86.avx512.vpdpbusd.512", acc, T.reinterpret(weights, dtype="int8x64"),
            T.reinterpret(splat(activations), dtype="int8x64"), dtype="int32x16",
        )  # fmt: skip
    return byte_dot(target, acc, weights, held(splat(activations), "int32"), wide)


def dot2_bf16(acc: Any, weights: Any, activations: Any) -> Any:
    """acc + the products of bfloat16 pairs in two float32 steps, odd column first.

    Weights are int32x16 words, activations one word. Where `dots_bf16`, `dot_bf16` gives the same in one instruction.
    """

    (odd, even), (x_odd, x_even) = bf16_halves(weights), bf16_halves(splat(activations))  # spread first: a load does
    return fma(even, x_even, fma(odd, x_odd, acc))


def bf16_halves(words: Any) -> tuple[Any, Any]:
    """Odd and even columns, float32x16 each, of bfloat16 pairs in int32x16 words."""
    odd, even = T.bitwise_and(words, splat(i32(-65536))), T.shift_left(words, splat(i32(16)))
    return T.reinterpret(odd, dtype="float32x16"), T.reinterpret(even, dtype="float32x16")


# One instruction for two products. Words of pairs, because this TVM crashes on a reinterpretation as bfloat16 vectors.
DOT_BF16 = """
define <16 x float> @llmc_dot_bf16(<16 x float> %acc, <16 x i32> %a, <16 x i32> %b) alwaysinline {
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %acc, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""


def dots_bf16(target: Target) -> bool:
    """Whether one instruction multiplies pairs of bfloat16."""
    return target.has("avx512_bf16") and target.has("avx512f")


def dot_bf16(acc: Any, a: Any, b: Any) -> Any:
    """acc + the products of the bfloat16 pairs in int32x16 words, where `dots_bf16`, in a kernel that has DOT_BF16.

    In two steps, the odd ones first, each rounded once, as fma would; but numbers below 2^-126 are zero.
    """
    return T.call_extern("float32x16", "llmc_dot_bf16", acc, a, b)


def widen_f16(target: Target, words: Any) -> Any:
    """int32x8 words holding sixteen float16 -> float32x16."""
    halves = T.reinterpret(words, dtype="float16x16")
    if target.has("avx512f") or target.has("f16c") or target.has("asimd"):
        return T.cast(halves, "float32x16")
    # By integer arithmetic, exact for denormals too: place exponent and fraction, then scale by 2^112.
    bits = T.cast(T.reinterpret(words, dtype="uint16x16"), "int32x16")
    magnitude = T.shift_left(T.bitwise_and(bits, splat(i32(0x7FFF))), splat(i32(13)))
    sign = T.shift_left(T.bitwise_and(bits, splat(i32(0x8000))), splat(i32(16)))
    scaled = T.reinterpret(magnitude, dtype="float32x16") * splat(f32(2.0**112))
    return T.reinterpret(T.bitwise_or(T.reinterpret(scaled, dtype="int32x16"), sign), dtype="float32x16")


def widen_bf16(halves: Any) -> Any:
    """uint16x16 bfloat16 bits -> float32x16."""
    return T.reinterpret(T.shift_left(T.cast(halves, "int32x16"), splat(i32(16))), dtype="float32x16")


def near_bf16(x: Any) -> Any:
    """float32x16 -> the nearest bfloat16, those half-way away from zero: half the instructions of ties to even."""
    bits = T.reinterpret(x, dtype="int32x16") + splat(i32(0x8000))
    return T.reinterpret(T.bitwise_and(bits, splat(i32(-65536))), dtype="float32x16")


def even_bf16(x: Any) -> Any:
    """float32x16 -> the bits of the nearest bfloat16, ties to even, uint16x16."""
    bits = T.reinterpret(x, dtype="int32x16")
    odd = T.bitwise_and(T.shift_right(bits, splat(i32(16))), splat(i32(1)))
    return T.cast(T.shift_right(bits + splat(i32(0x7FFF)) + odd, splat(i32(16))), "uint16x16")


def widened(bits: Any) -> Any:
    """A scalar bfloat16's int32 bits -> float32."""
    return T.reinterpret(T.shift_left(bits, i32(16)), dtype="float32")


def round_bf16(value: Any) -> Any:
    """Scalar float32 -> the int32 of its bfloat16 bits, ties to even."""
    bits = T.reinterpret(value, dtype="uint32")
    odd = T.bitwise_and(T.shift_right(bits, tirx.const(16, "uint32")), tirx.const(1, "uint32"))
    rounded = T.shift_right(bits + tirx.const(0x7FFF, "uint32") + odd, tirx.const(16, "uint32"))
    return T.cast(rounded, "int32")


def butterfly(x: Any, distance: int) -> Any:
    """Sums and differences of lanes `distance` (1, 2, 4 or 8) apart: a, b -> a + b, a - b. Exact to the last bit."""
    other = tirx.Shuffle([x], [i32(lane ^ distance) for lane in range(LANES)])
    signs = [f32(-1 if lane & distance else 1) for lane in range(LANES)]
    return fma(x, tirx.Shuffle(signs, [i32(lane) for lane in range(LANES)]), other)


def round_int(x: Any) -> Any:
    """float32x16 with |x| < 2^22 -> int32x16, ties to even: 1.5 * 2^23 + x keeps the integer in its low bits."""
    magic = 12582912.0
    return T.reinterpret(x + splat(f32(magic)), dtype="int32x16") - splat(i32(0x4B400000))


def exp(x: Any) -> Any:
    """e^x in float32x16 for x <= 88, within 2 ulp; below -87 it is e^-87, near enough to 0.

    2^n * e^r with n = round(x / ln 2) by adding 1.5 * 2^23, r by Cody-Waite in two parts, e^r by a polynomial.
    """
    low = splat(f32(-87.0))
    x = T.max(x, low)
    shifter = splat(f32(12582912.0))
    n = fma(x, splat(f32(1 / math.log(2))), shifter) - shifter
    r = fma(n, splat(f32(-0.693359375)), x)
    r = fma(n, splat(f32(2.12194440e-4)), r)
    poly = splat(f32(1 / math.factorial(6)))
    for power in range(5, -1, -1):
        poly = fma(poly, r, splat(f32(1 / math.factorial(power))))
    scale = T.shift_left(T.cast(n, "int32x16") + splat(i32(127)), splat(i32(23)))
    return poly * T.reinterpret(scale, dtype="float32x16")


# 2^r - 1 over powers of r from the fourth down, fitted to the least relative error of 2^r for |r| <= 0.5: 2.8e-6.
_POWER = (0.009582853, 0.055906426, 0.24024099, 0.6931242)


def exp_near(x: Any) -> Any:
    """e^x in float32x16 for x <= 0, relatively within 7e-6, of 0 exactly 1; below -87 it is e^-87: a third less work.

    2^n * 2^r with n + r = x / ln 2, in which the error of a rounded 1 / ln 2 grows with x. 1.5 * 2^23 + n has n in its
    low bits, so adding these to the exponent of 2^r multiplies by 2^n.
    """
    x, per_unit = T.max(x, splat(f32(-87.0))), splat(f32(1 / math.log(2)))
    shifter = splat(f32(12582912.0))
    shifted = held(fma(x, per_unit, shifter))
    r = held(fma(x, per_unit, shifter - shifted))
    poly = _polynomial(r, (*_POWER, 1.0))
    bits = T.reinterpret(poly, dtype="int32x16")
    exponent = T.shift_left(T.reinterpret(shifted, dtype="int32x16"), splat(i32(23)))
    return T.reinterpret(bits + exponent, dtype="float32x16")


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """Their sum times powers of x, the highest power's first."""
    total = splat(f32(coefficients[0]))
    for coefficient in coefficients[1:]:
        total = fma(total, x, splat(f32(coefficient)))
    return total


# (tanh(x) / x - 1) / x^2 in x^2 for |x| < 0.625, and P of normal_tail, fitted to the least relative error: 5e-9, 4e-8.
_TANH = (0.0022928266, -0.008344026, 0.021768947, -0.053959263, 0.13333304, -0.33333333)
_TAIL = (
    -0.029157719, 0.14403018, -0.25583762, 0.1593183, -0.023211494, 0.10555218, 0.11982136, 0.1398635, 0.1396213,
)  # fmt: skip


def tanh(x: Any) -> Any:
    """The hyperbolic tangent in float32x16, within 3 ulp.

    1 - 2 / (1 + e^2|x|) with the sign of x; where that would cancel, x + x^3 times a polynomial.
    """
    size = T.max(x, splat(f32(0)) - x)
    far = splat(f32(1)) - splat(f32(2)) / (splat(f32(1)) + exp(T.min(size + size, splat(f32(88)))))
    square = size * size
    near = fma(size * square, _polynomial(square, _TANH), size)
    found = T.Select(size >= splat(f32(0.625)), far, near)  # in this order: of NaN `near` is NaN, `far` is 1
    return T.Select(x < splat(f32(0)), splat(f32(0)) - found, found)


def normal_tail(x: Any) -> Any:
    """The share of the normal distribution above x >= 0 in float32x16, to 2e-7, relatively to 5e-6.

    e^(-x^2 / 2) t P(t) with t = 1 / (1 + 0.35 x): the form of Abramowitz and Stegun 26.2.17.
    """
    t = splat(f32(1)) / (splat(f32(1)) + x * splat(f32(0.35)))
    return exp(x * x * splat(f32(-0.5))) * t * _polynomial(t, _TAIL)
