"""Sixteen-lane vector pieces that kernels are built from, each in the best form a target's capabilities allow.

Every piece has a generic form (plain LLVM vector arithmetic, no intrinsic of one machine) and gives the same result on
every target unless its docstring says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

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


def prefetch(pointer: Any) -> None:
    """Ask for the cache line of an address; never faults."""
    T.evaluate(T.call_llvm_intrin("llvm.prefetch", pointer, i32(0), i32(3), i32(1), dtype="void"))


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32x16, rounded once: the same bits whatever the loop around it looks like."""
    return T.call_llvm_pure_intrin("llvm.fma", a, b, c, dtype="float32x16")


def reduce_max(x: Any) -> Any:
    """The greatest of sixteen float32 lanes."""
    return T.call_llvm_pure_intrin("llvm.vector.reduce.fmax", x, dtype="float32")


def reduce_sum(x: Any) -> Any:
    """The sum of sixteen float32 lanes, halves first (a fixed order)."""
    for width in (8, 4, 2):
        x = T.vectorlow(f"float32x{width}", x) + T.vectorhigh(f"float32x{width}", x)
    return tirx.Shuffle([x], [i32(0)]) + tirx.Shuffle([x], [i32(1)])


def dot4(target: Target, acc: Any, weights: Any, activations: Any) -> Any:
    """acc + sum over 4 of u8 weights (int32x16 words) * s8 activations (one int32 word), exact in int32x16."""
    if target.has("avx512_vnni") and target.has("avx512f"):
        return T.call_llvm_pure_intrin(
            "llvm.x86.avx512.vpdpbusd.512", acc, T.reinterpret(weights, dtype="int8x64"),
            T.reinterpret(splat(activations), dtype="int8x64"), dtype="int32x16",
        )  # fmt: skip
    mask = splat(i32(0xFF))
    for byte in range(4):
        code = T.bitwise_and(T.shift_right(weights, splat(i32(8 * byte))), mask)
        signed = T.shift_right(T.shift_left(activations, i32(24 - 8 * byte)), i32(24))
        acc = acc + code * splat(signed)
    return acc


def dot2_bf16(acc: Any, weights: Any, activations: Any) -> Any:
    """acc + the products of bfloat16 pairs in two float32 steps, odd column first.

    Weights are int32x16 words, activations one word. (`vdpbf16ps` would do it in one, but this TVM line crashes on
    a reinterpretation to bfloat16 vectors.)
    """
    high = i32(-65536)
    odd = T.reinterpret(T.bitwise_and(weights, splat(high)), dtype="float32x16")
    even = T.reinterpret(T.shift_left(weights, splat(i32(16))), dtype="float32x16")
    x_odd = T.reinterpret(T.bitwise_and(activations, high), dtype="float32")
    x_even = T.reinterpret(T.shift_left(activations, i32(16)), dtype="float32")
    return fma(even, splat(x_even), fma(odd, splat(x_odd), acc))


def widen_f16(target: Target, words: Any) -> Any:
    """int32x8 words holding sixteen float16 -> float32x16."""
    halves = T.reinterpret(words, dtype="float16x16")
    if target.has("avx512f") or target.has("f16c") or target.has("fp16"):
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


def round_bf16(value: Any) -> Any:
    """Scalar float32 -> the int32 of its bfloat16 bits, ties to even."""
    bits = T.reinterpret(value, dtype="uint32")
    odd = T.bitwise_and(T.shift_right(bits, tirx.const(16, "uint32")), tirx.const(1, "uint32"))
    rounded = T.shift_right(bits + tirx.const(0x7FFF, "uint32") + odd, tirx.const(16, "uint32"))
    return T.cast(rounded, "int32")


def round_int(x: Any) -> Any:
    """float32x16 with |x| < 2^22 -> int32x16, ties to even: 1.5 * 2^23 + x keeps the integer in its low bits."""
    magic = 12582912.0
    return T.reinterpret(x + splat(f32(magic)), dtype="int32x16") - splat(i32(0x4B400000))


def exp(x: Any) -> Any:
    """e^x in float32x16 for x <= 88, within 2 ulp; below -87 it is e^-87, near enough to 0.

    2^n * e^r with n = round(x / ln 2) by adding 1.5 * 2^23, r by Cody-Waite in two parts, e^r by a degree-6 polynomial.
    """
    low = splat(f32(-87.0))
    x = T.max(x, low)
    shifter = splat(f32(12582912.0))
    n = fma(x, splat(f32(1 / math.log(2))), shifter) - shifter
    r = fma(n, splat(f32(-0.693359375)), x)
    r = fma(n, splat(f32(2.12194440e-4)), r)
    poly = splat(f32(1 / 720))
    for divisor in (120, 24, 6, 2, 1, 1):
        poly = fma(poly, r, splat(f32(1 / divisor)))
    power = T.shift_left(T.cast(n, "int32x16") + splat(i32(127)), splat(i32(23)))
    return poly * T.reinterpret(power, dtype="float32x16")
