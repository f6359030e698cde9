"""Bytes of codes to the bytes that they stand for: by tables of at most 128 entries, or as digits.

Every form gives the same result; which one is best is a question of what a target's instructions can permute.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.targets.narrow import constant, few_registers, in_order, joined, split
from llmc.targets.target import Target
from llmc.targets.vector import LANES, held, i32, lanes, registers

_SIZES = (16, 32, 64, 128)  # of tables, by which they are looked up in
_HELD = 32  # bytes of a table that registers hold, besides all else: measured
_PSHUFB = "llvm.x86.avx2.pshuf.b"


def lookup(target: Target, table: NDArray[np.uint8], codes: Any) -> Any:
    """Each byte of codes (int32x16 words) replaced by table[byte]."""
    return lookups(target, table, [codes])[0][0]


def lookups(target: Target, table: NDArray[np.uint8], words: list[Any]) -> list[list[Any]]:
    """For each of some words (int32x16 of codes) those that their bytes stand for: one for each column of the table.

    table: (entries,) or (entries, columns). Where the target `permutes_bytes`, bits of a byte above those the table
    needs do not matter, if its length is a power of two. Several words: for a part of a kernel that has
    `narrow.functions`.
    """
    size = next(size for size in _SIZES if len(table) <= size)
    columns = [np.resize(column, size) for column in table.reshape(len(table), -1).T]
    if not target.permutes_bytes and target.has("avx2"):
        return _by_shuffles(target, columns, words)
    one = _by_permutation if target.permutes_bytes else _by_tables if target.has("asimd") else _in_memory
    return [[one(column, word) for column in columns] for word in words]


def words_at_once(target: Target, table: NDArray[np.uint8]) -> int:
    """How many words `lookups` should have together: of tables that registers cannot hold, each part is loaded once."""
    return 2 if table.size > _HELD and few_registers(target) else 1


def _by_permutation(table: NDArray[np.uint8], codes: Any) -> Any:
    """One byte permutation of one register, or of two for 128 entries."""
    index, full = T.reinterpret(codes, dtype="int8x64"), np.resize(table, 128)
    low, high = constant(full[:64], "int8x64"), constant(full[64:], "int8x64")
    if len(table) == 128:
        found = T.call_llvm_pure_intrin("llvm.x86.avx512.vpermi2var.qi.512", low, index, high, dtype="int8x64")
    else:
        found = T.call_llvm_pure_intrin("llvm.x86.avx512.permvar.qi.512", low, index, dtype="int8x64")
    return T.reinterpret(found, dtype="int32x16")


def _by_shuffles(target: Target, columns: list[NDArray[np.uint8]], words: list[Any]) -> list[list[Any]]:
    """`vpshufb` looks up by the low four bits, and gives 0 where the top bit is set: by an index below 0.

    Every sixteen holds what changes from the one before it, so an index finds the sum, without carries, of its own and
    of all before. Several words, where registers are few, are made in the order written here: LLVM would begin with
    all tables at once.
    """
    ordered = len(words) > 1 and few_registers(target)

    def kept(x: Any) -> Any:
        part = T.reinterpret(x, dtype="int32x8")
        return held(in_order(part) if ordered else part, "int32", 8)

    sixteen = T.broadcast(tirx.const(16, "int8"), 32)
    indexes = [held(part, "int32", 8) for word in words for part in split(word, 2)]
    found: list[list[Any]] = [[] for _ in indexes]
    for start in range(0, len(columns[0]), 16):
        changes = [column[start : start + 16] ^ (column[start - 16 : start] if start else 0) for column in columns]
        tables = [constant(np.tile(change, 2), "int8x32") for change in changes]
        for at, own in enumerate(found):
            if start:
                indexes[at] = kept(T.reinterpret(indexes[at], dtype="int8x32") - sixteen)
            index = T.reinterpret(indexes[at], dtype="int8x32")
            more = [T.call_llvm_pure_intrin(_PSHUFB, table, index, dtype="int8x32") for table in tables]
            if own:
                more = [T.bitwise_xor(T.reinterpret(a, dtype="int8x32"), b) for a, b in zip(own, more, strict=True)]
            own[:] = map(kept, more)
    return [[joined(list(parts)) for parts in zip(*found[at : at + 2], strict=True)] for at in range(0, len(found), 2)]


def _by_tables(table: NDArray[np.uint8], words: Any) -> Any:
    """`tbl` looks up in four registers at most, and `tbx` keeps what lies outside of them."""
    return joined([_by_table(table, part) for part in split(words, 4)])


def _by_table(table: NDArray[np.uint8], part: Any) -> Any:
    index = T.reinterpret(part, dtype="int8x16")
    rows = [constant(table[start : start + LANES], "int8x16") for start in range(0, len(table), LANES)]
    name = f"llvm.aarch64.neon.tbl{min(len(rows), 4)}.v16i8"
    found = T.call_llvm_pure_intrin(name, *rows[:4], index, dtype="int8x16")
    if len(rows) > 4:
        beyond = index - T.broadcast(tirx.const(64, "int8"), LANES)
        found = T.call_llvm_pure_intrin("llvm.aarch64.neon.tbx4.v16i8", found, *rows[4:], beyond, dtype="int8x16")
    return found


def _in_memory(table: NDArray[np.uint8], codes: Any) -> Any:
    """By a table on the stack, a byte at a time: for machines without a byte permutation."""
    stacked, words = registers((len(table),), "int32"), registers((LANES,), "int32")
    for start in range(0, len(table), LANES):
        part = tirx.Shuffle([i32(int(v)) for v in table[start : start + LANES]], [i32(i) for i in range(LANES)])
        T.buffer_store(stacked, part, [lanes(start)])
    T.buffer_store(words, codes, [lanes(0)])
    with T.serial(0, LANES) as lane:
        found = [
            T.shift_left(stacked[T.bitwise_and(T.shift_right(words[lane], i32(8 * byte)), i32(0xFF))], i32(8 * byte))
            for byte in range(4)
        ]
        whole = T.bitwise_or(T.bitwise_or(found[0], found[1]), T.bitwise_or(found[2], found[3]))
        T.buffer_store(words, whole, [lane])
    return words[lanes(0)]


def divides(target: Target) -> bool:
    """Whether `digits` beat looking up."""
    return target.arch == "x86_64" and not target.permutes_bytes


def digits(base: int, codes: Any) -> tuple[Any, Any]:
    """Each byte's two digits, low and high: codes (int32x16 words) below 128 and base^2.

    A word of 16 bits times 65536 / base, rounded up, has the upper byte's quotient in its upper byte of 16 above: what
    the lower byte adds is less than one of the upper.
    """
    words = T.reinterpret(codes, dtype="uint16x32")

    def all_of(value: int, dtype: str) -> Any:
        return T.broadcast(tirx.const(value, dtype), 32)

    def quotient(x: Any) -> Any:
        wide = T.cast(x, "uint32x32") * all_of(-(-65536 // base), "uint32")
        return T.cast(T.shift_right(wide, all_of(16, "uint32")), "uint16x32")

    def masked(x: Any, mask: int) -> Any:
        return T.bitwise_and(x, all_of(mask, "uint16"))

    high = T.bitwise_or(quotient(masked(words, 0x00FF)), masked(quotient(words), 0xFF00))
    low = words - high * all_of(base, "uint16")
    return T.reinterpret(low, dtype="int32x16"), T.reinterpret(high, dtype="int32x16")
