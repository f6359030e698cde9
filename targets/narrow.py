"""Byte dot products for machines without AVX-512 VNNI, in registers of their own width.

vector.py asks for these; every form gives the same result, exact in int32. Sixteen int32 lanes are 64 bytes: one
register of AVX-512, two of AVX2, four of SSE2 and NEON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.target import Target

LANES = 16
Dot = Callable[[Any, Any], Any]  # accumulator int32xN, weight bytes as int32xN -> the new accumulator


def _all(value: int, lanes: int, dtype: str = "int32") -> Any:
    return T.broadcast(tirx.const(value, dtype), lanes)


def _call(name: str, dtype: str, *operands: Any) -> Any:
    return T.call_llvm_pure_intrin(name, *operands, dtype=dtype)


def _as(x: Any, dtype: str) -> Any:
    return T.reinterpret(x, dtype=dtype)


def split(x: Any, count: int) -> list[Any]:
    """An int32x16 as `count` (1, 2 or 4) registers of int32x(16 / count)."""
    out = [x]
    while len(out) < count:
        dtype = f"int32x{LANES // (2 * len(out))}"
        out = [half for part in out for half in (T.vectorlow(dtype, part), T.vectorhigh(dtype, part))]
    return out


def joined(parts: list[Any]) -> Any:
    """Registers of any type as one int32x16."""
    words = [_as(part, f"int32x{LANES // len(parts)}") for part in parts]
    return words[0] if len(words) == 1 else tirx.Shuffle(words, [tirx.const(i, "int32") for i in range(LANES)])


def _registers(target: Target) -> int:
    """How many of them hold an int32x16."""
    if target.has("avx_vnni"):
        return 2
    return 1 if target.has("avx512bw") else 2 if target.has("avx2") else 4


def byte_dot(target: Target, acc: Any, weights: Any, activations: Any, wide: bool) -> Any:
    """acc + sum over 4 of u8 weights (int32x16 words) * s8 activations (a word in all lanes), exact in int32x16.

    `wide`: weights may be above 127. For a part of a kernel that has `functions`.
    """
    count = _registers(target)
    dot = _form(target, wide)(split(activations, count)[0], LANES // count)
    return joined([_summed(target, dot(a, w)) for a, w in zip(split(acc, count), split(weights, count), strict=True)])


def multiplies_signed(target: Target) -> bool:
    """Whether weights above 127 are quicker less 128, by `signed_dot`, than as they are by `byte_dot`."""
    return _adds_pairs(target) and few_registers(target)


def signed_dot(target: Target, acc: Any, weights: Any, activations: Any) -> Any:
    """acc + sum over 4 of s8 weights (int32x16 words) * s8 activations above -128 (a word in all lanes), exact.

    Where `multiplies_signed`: sizes of weights times activations with the weights' signs, of which two fit into 16
    bits, for 2 * 128 * 127 does. For a part of a kernel that has `functions`.
    """
    count = _registers(target)
    lanes = LANES // count
    x = _as(split(activations, count)[0], f"int8x{4 * lanes}")
    parts = []
    for total, words in zip(split(acc, count), split(weights, count), strict=True):
        w = _as(words, f"int8x{4 * lanes}")
        size, turned = (_call(_PSIGN, f"int8x{4 * lanes}", own, w) for own in (w, x))
        parts.append(_summed(target, _pairs_of_bytes(turned, lanes)(total, size)))
    return joined(parts)


def _adds_pairs(target: Target) -> bool:
    """Whether the best there is for products of bytes are sums of two in 16 bits."""
    return target.has("avx2") and not target.has("avx_vnni") and not target.has("avx512_vnni")


def sums_of_pairs(target: Target, top: int) -> int:
    """How many dots of four columns, of weights up to `top`, may be summed in 16 bits first; 1: that saves nothing."""
    return max(1, (2**15 - 1) // (2 * 128 * top)) if _adds_pairs(target) else 1


def add_pairs(target: Target, sums: Any, weights: Any, activations: Any) -> Any:
    """`byte_dot` before the pairs of a word are added: sums, each word two int16, + the products' (int32x16 all).

    Activations are a word in all lanes; for a part of a kernel that has `functions`.
    """
    count = _registers(target)
    lanes = LANES // count
    own = []
    for total, weight, x in zip(*(split(each, count) for each in (sums, weights, activations)), strict=True):
        more = _pmaddubsw(weight, _as(x, f"int8x{4 * lanes}"), lanes)
        own.append(_summed(target, _as(_as(total, f"int16x{2 * lanes}") + more, f"int32x{lanes}")))
    return joined(own)


def few_registers(target: Target) -> bool:
    """Whether there are sixteen registers of 32 bytes and no more: AVX2's."""
    return target.has("avx2") and not target.has("avx512bw")


# What nothing is known of, after all of these before it. LLVM would add the products of two words to one another first,
# and sum the lower halves of all registers before the upper ones: what both need is spilled then.
_IN_ORDER = """
define <8 x i32> @llmc_in_order(<8 x i32> %x) alwaysinline {
  %r = call <8 x i32> asm sideeffect "", "=x,0"(<8 x i32> %x)
  ret <8 x i32> %r
}
"""


def functions(target: Target) -> list[str]:
    """LLVM's text of what is called to have things `in_order`."""
    return [_IN_ORDER] if few_registers(target) else []


def in_order(x: Any) -> Any:
    """int32x8, made after those before it: where there are `few_registers`."""
    return T.call_extern("int32x8", "llmc_in_order", x)


def _summed(target: Target, total: Any) -> Any:
    """A sum, in order where its products take so many registers that few are left."""
    return in_order(total) if _adds_pairs(target) and few_registers(target) else total


def pairs_added(target: Target, sums: Any, times: int = 1) -> Any:
    """int32x16: the two int16 of each word of `sums` added, so many times."""
    count = _registers(target)
    lanes = LANES // count
    return joined([_pmaddwd(part, _all(times, 2 * lanes, "int16"), lanes) for part in split(sums, count)])


def _form(target: Target, wide: bool) -> Callable[[Any, int], Dot]:
    """What makes the dot with a splat word of activations, of so many words."""
    if target.has("avx_vnni"):
        return _vnni
    if target.arch == "x86_64":
        return _pairs_of_bytes if target.has("avx2") and not wide else _pairs_of_words
    if target.has("i8mm"):
        return _usdot
    return _shifted(_sdot if target.has("asimddp") else _smull, wide)


def _vnni(activations: Any, lanes: int) -> Dot:
    """One instruction, of AVX-VNNI."""
    x = _as(activations, "int8x32")
    return lambda acc, w: _call("llvm.x86.avx512.vpdpbusd.256", "int32x8", acc, _as(w, "int8x32"), x)


_PSIGN = "llvm.x86.avx2.psign.b"
_PMADDUBSW = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
_PMADDWD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


def _pmaddwd(a: Any, b: Any, lanes: int) -> Any:
    """Products of int16, summed in pairs."""
    halves = [_as(x, f"int16x{2 * lanes}") for x in (a, b)]
    return _call(_PMADDWD[lanes], f"int32x{lanes}", *halves)


def _pmaddubsw(weights: Any, activations: Any, lanes: int) -> Any:
    """Products of unsigned bytes (int32 words) and signed ones, summed in pairs to int16, saturated."""
    return _call(_PMADDUBSW[lanes], f"int16x{2 * lanes}", _as(weights, f"int8x{4 * lanes}"), activations)


def _pairs_of_bytes(activations: Any, lanes: int) -> Dot:
    """`vpmaddubsw` sums two products into 16 bits and saturates: 2 * 127 * 127 fits, so not for wide weights."""
    x = _as(activations, f"int8x{4 * lanes}")

    def dot(acc: Any, w: Any) -> Any:
        return acc + _pmaddwd(_pmaddubsw(w, x, lanes), _all(1, 2 * lanes, "int16"), lanes)

    return dot


def _pairs_of_words(activations: Any, lanes: int) -> Dot:
    """Even and odd bytes as int16, two by two: exact for all bytes, and in every x86-64."""
    words = _as(activations, f"int16x{2 * lanes}")
    eight = _all(8, 2 * lanes, "int16")
    odd = T.shift_right(words, eight)
    even = T.shift_right(T.shift_left(words, eight), eight)

    def dot(acc: Any, w: Any) -> Any:
        low = T.bitwise_and(w, _all(0x00FF00FF, lanes))
        high = T.shift_right(_as(w, f"uint16x{2 * lanes}"), _all(8, 2 * lanes, "uint16"))
        return acc + _pmaddwd(low, even, lanes) + _pmaddwd(high, odd, lanes)

    return dot


def _usdot(activations: Any, lanes: int) -> Dot:
    """Unsigned by signed bytes, of I8MM."""
    x = _as(activations, "int8x16")
    return lambda acc, w: _call("llvm.aarch64.neon.usdot.v4i32.v16i8", "int32x4", acc, _as(w, "int8x16"), x)


def _sdot(acc: Any, w: Any, x: Any) -> Any:
    return _call("llvm.aarch64.neon.sdot.v4i32.v16i8", "int32x4", acc, w, x)


def _smull(acc: Any, w: Any, x: Any) -> Any:
    """Products as int16, -128 * -128 at most, summed in pairs to int32, and those in pairs."""
    sums = []
    for half in (T.vectorlow, T.vectorhigh):
        products = _call("llvm.aarch64.neon.smull.v8i16", "int16x8", half("int8x8", w), half("int8x8", x))
        sums.append(_call("llvm.aarch64.neon.saddlp.v4i32.v8i16", "int32x4", products))
    return acc + _call("llvm.aarch64.neon.addp.v4i32", "int32x4", *sums)


def _shifted(signed: Callable[[Any, Any, Any], Any], wide: bool) -> Callable[[Any, int], Dot]:
    """The dot by one that takes signed bytes only: weights less 128, and 128 times the activations on top."""

    def make(activations: Any, lanes: int) -> Dot:
        x = _as(activations, "int8x16")
        if not wide:
            return lambda acc, w: signed(acc, _as(w, "int8x16"), x)
        lacking = signed(_all(0, lanes), _all(-128, 4 * lanes, "int8"), x)

        def dot(acc: Any, w: Any) -> Any:
            less = T.bitwise_xor(w, _all(-0x7F7F7F80, lanes))  # the top bit of every byte
            return signed(acc, _as(less, "int8x16"), x) - lacking

        return dot

    return make


def constant(table: NDArray[np.uint8], dtype: str) -> Any:
    """A vector of constant bytes."""
    words = [tirx.const(int(word), "int32") for word in np.ascontiguousarray(table).view(np.int32)]
    return _as(tirx.Shuffle(words, [tirx.const(i, "int32") for i in range(len(words))]), dtype)
