"""What kernels call that CUDA C++ has no plain words for: a few device functions, put in front of TVM's source.

Each has a caller here, and its meaning in NumPy in tests/cuda/cuda_threads.py. Behind them stand what codes of weight
formats stand for, as tables: TIR has no constant arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.formats import FORMATS, BlockFormat, to_bf16

# PTX ISA 8.0, "mma.m16n8k16" for .bf16: lane 4 g + q has of A (16 rows, 16 k) rows g and g + 8, and of B (16 k, 8
# columns) column g, each at k of 2q, 2q + 1, 2q + 8, 2q + 9; of the sums rows g and g + 8 at columns 2q and 2q + 1.
FUNCTIONS = """\
static __device__ __forceinline__ void llmc_mma_m16n8k16_bf16(float* sums, const unsigned* a, const unsigned* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ unsigned llmc_bf16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
static __device__ __forceinline__ unsigned llmc_bf16_add(unsigned a, unsigned b) {
  unsigned sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3F803F80u), "r"(b));
  return sum;
}
static __device__ __forceinline__ float llmc_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
static __device__ __forceinline__ unsigned llmc_votes(int holds) { return __ballot_sync(0xFFFFFFFFu, holds); }
static __device__ __forceinline__ float llmc_half(unsigned bits) {
  float value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(bits));
  return value;
}
static __device__ __forceinline__ unsigned llmc_word_at(const unsigned* words, unsigned bytes) {
  return *reinterpret_cast<const unsigned*>(reinterpret_cast<const char*>(words) + bytes);
}
static __device__ __forceinline__ void llmc_after_launches() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
static __device__ __forceinline__ void llmc_copy_async(void* shared, const void* global, unsigned bytes) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(place), "l"(global), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void llmc_load_pair(unsigned* to, const unsigned* given) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(given) : "memory");
}
static __device__ __forceinline__ void llmc_commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int GROUPS> static __device__ __forceinline__ void llmc_wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(GROUPS) : "memory");
}
"""
GROUP_ROWS = (32, 128, 256)  # of x, that one product of four warps takes


def _group_functions(rows: int) -> str:
    """PTX ISA 8.0, "wgmma.mma_async": 64 by 16 out of registers, 16 a warp as `mma` has them, by 16 by `rows` out of
    shared memory: matrices of 8 rows by 8 columns, 128 bytes each, the other eight columns behind them."""
    count = rows // 2
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""\
static __device__ __forceinline__ void llmc_group_mma_{rows}(
    float* sums, const unsigned* a, const unsigned* x, unsigned offset, unsigned step, int begun) {{
  unsigned place = (static_cast<unsigned>(__cvta_generic_to_shared(x)) >> 4) + (offset >> 4) + (8u << 16);
  unsigned long long matrix = static_cast<unsigned long long>(step >> 4) << 32 | place;
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "
      "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{", ".join(f"%{i}" for i in range(count))}}}, "
      "{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, p, 1, 1, 0; }}"
      : {sums} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix), "r"(begun));
}}
template <int GROUPS> static __device__ __forceinline__ void llmc_wait_group_products_{rows}(float* sums) {{
  asm volatile("wgmma.wait_group.sync.aligned %{count};" : {sums} : "n"(GROUPS) : "memory");
}}
"""


FUNCTIONS += """\
static __device__ __forceinline__ void llmc_share_with_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
template <int WORDS> static __device__ __forceinline__ void llmc_begin_group_products(unsigned* a) {
  for (int i = 0; i < WORDS; i++) asm volatile("" : "+r"(a[i]));
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
static __device__ __forceinline__ unsigned llmc_shared_place(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
static __device__ __forceinline__ void llmc_begin_arrivals(void* arrivals, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(llmc_shared_place(arrivals)), "r"(count) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
static __device__ __forceinline__ void llmc_arrive(void* arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(llmc_shared_place(arrivals)) : "memory");
}
static __device__ __forceinline__ void llmc_wait_arrivals(void* arrivals, unsigned turn) {
  unsigned done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(llmc_shared_place(arrivals)), "r"(turn & 1) : "memory");
  } while (!done);
}
static __device__ __forceinline__ void llmc_copy_whole(
    void* shared, const void* given, unsigned bytes, void* arrivals) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      : : "r"(llmc_shared_place(arrivals)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      : : "r"(llmc_shared_place(shared)), "l"(given), "r"(bytes), "r"(llmc_shared_place(arrivals)) : "memory");
}
static __device__ __forceinline__ unsigned llmc_load_now(const void* given) {
  unsigned word;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(given));
  return word;
}
static __device__ __forceinline__ void llmc_load_pair_now(unsigned* to, const void* given) {
  asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(given));
}
template <int GROUPS> static __device__ __forceinline__ void llmc_wait_group_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(GROUPS) : "memory");
}
static __device__ __forceinline__ void llmc_commit_group_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
""" + "".join(map(_group_functions, GROUP_ROWS))
COPIED = 4  # words that `copy_async` copies


def value_words(format: BlockFormat) -> list[int]:
    """What each code of a format with values stands for: a pair of bfloat16, of one column twice the same."""
    assert format.values is not None
    entries = np.asarray(format.values, np.int64).reshape(format.top + 1, -1) - center(format)
    both = to_bf16(np.ascontiguousarray(entries, np.float32)).astype(np.uint32)
    return [int(word) for word in both[:, 0] | both[:, -1] << 16]


def center(format: BlockFormat) -> int:
    """What is taken from values: the format's offset, or, where offsets are stored, about the middle of its values."""
    if isinstance(format.offset, int):
        return format.offset
    return (int(format.top if format.values is None else np.max(format.values)) + 1) // 2


def _tables() -> str:
    lines = []
    for format in FORMATS.values():
        if isinstance(format, BlockFormat) and format.values is not None:
            words = ", ".join(f"0x{word:08x}u" for word in value_words(format))
            lines.append(
                f"__device__ const unsigned llmc_values_{format.name}[] = {{{words}}};\n"
                f"__device__ __forceinline__ unsigned llmc_value_{format.name}(int code) {{\n"
                f"  return llmc_values_{format.name}[code];\n}}\n"
            )
    return "".join(lines)


TABLES = _tables()
PRELUDE = FUNCTIONS + TABLES


def mma(sums: Any, a: Any, b: Any) -> None:
    """sums (16, 8) += a (16, 16) @ b (16, 8) of bfloat16 pairs, by a whole warp: each the first word of a lane's."""
    T.evaluate(T.call_extern("void", "llmc_mma_m16n8k16_bf16", *(T.address_of(each) for each in (sums, a, b))))


def group_mma(rows: int, sums: Any, a: Any, x: Any, offset: int, step: Any, begun: Any) -> None:
    """sums (64, rows) += a (64, 16) @ x (16, rows) by four warps, some time until they have waited for it.

    Sums and a: buffer, and the first word of a lane's; x in shared memory, `offset` bytes behind `x`, which many
    products may have in common: eight rows every `step` bytes. `begun` 0: sums are zero, whatever they hold.
    """
    T.evaluate(
        T.call_extern(
            "void", f"llmc_group_mma_{rows}", *(T.address_of(each) for each in (sums[0], a, x)), offset, step, begun
        )
    )


def begin_group_products(a: Any, words: int) -> None:
    """Before products of four warps: registers are as they are to be."""
    T.evaluate(T.call_extern("void", f"llmc_begin_group_products<{words}>", T.address_of(a[0])))


def commit_group_products() -> None:
    """The products since the last time are a group."""
    T.evaluate(T.call_extern("void", "llmc_commit_group_products"))


def wait_group_products(groups: int, sums: Any = None, rows: int = 0) -> None:
    """All groups but the last so many are done, and these sums are there to be read, if any are given."""
    if sums is None:
        T.evaluate(T.call_extern("void", f"llmc_wait_group_products<{groups}>"))
    else:
        T.evaluate(T.call_extern("void", f"llmc_wait_group_products_{rows}<{groups}>", T.address_of(sums[0])))


def share_with_tensor_cores() -> None:
    """What the thread has put into shared memory is there for `group_mma`; for others' behind a barrier."""
    T.evaluate(T.call_extern("void", "llmc_share_with_tensor_cores"))


def begin_arrivals(arrivals: Any, count: int) -> None:
    """Turns in which so many threads arrive, or one that begins a copy; others know of it behind a barrier."""
    T.evaluate(T.call_extern("void", "llmc_begin_arrivals", T.address_of(arrivals), count))


def arrive(arrivals: Any) -> None:
    """The thread has come, of those that a turn waits for."""
    T.evaluate(T.call_extern("void", "llmc_arrive", T.address_of(arrivals)))


def wait_arrivals(arrivals: Any, turn: Any) -> None:
    """Until turn `turn`, from 0 on, is over, or the one before it is not: turns are told apart by their last bit."""
    T.evaluate(T.call_extern("void", "llmc_wait_arrivals", T.address_of(arrivals), turn))


def copy_whole(shared: Any, given: Any, bytes: int, arrivals: Any) -> None:
    """Begin to copy to shared memory, for one thread of a block; it arrives, and its turn waits for the bytes too."""
    shared, given, arrivals = (T.address_of(each) for each in (shared, given, arrivals))
    T.evaluate(T.call_extern("void", "llmc_copy_whole", shared, given, bytes, arrivals))


def load_now(given: Any) -> Any:
    """A word of a matrix, which is read here and not where it is used."""
    return T.call_pure_extern("uint32", "llmc_load_now", T.address_of(given))


def load_pair_now(to: Any, given: Any) -> None:
    """Two words of a matrix into registers, the first at a multiple of 8 bytes, likewise."""
    T.evaluate(T.call_extern("void", "llmc_load_pair_now", T.address_of(to), T.address_of(given)))


def after_launches() -> None:
    """All launches before this one have ended, and what they wrote is there; the next one may begin to wait for it."""
    T.evaluate(T.call_extern("void", "llmc_after_launches"))


def copy_async(shared: Any, given: Any, bytes: Any) -> None:
    """Begin to copy 16 bytes of global memory, both places in multiples of them; of bytes beyond `bytes`, zeros."""
    T.evaluate(T.call_extern("void", "llmc_copy_async", T.address_of(shared), T.address_of(given), bytes))


def load_pair(to: Any, given: Any) -> None:
    """Two words of global memory into registers, the first a multiple of 8 bytes: on their way before what follows.

    A plain read a compiler may put off until after it has waited for copies.
    """
    T.evaluate(T.call_extern("void", "llmc_load_pair", T.address_of(to), T.address_of(given)))


def commit_copies() -> None:
    """The thread's copies since the last time are a group."""
    T.evaluate(T.call_extern("void", "llmc_commit_copies"))


def wait_copies(groups: int) -> None:
    """All of the thread's groups but the last so many are there, for itself; for others behind a barrier."""
    T.evaluate(T.call_extern("void", f"llmc_wait_copies<{groups}>"))


def sync_warp() -> None:
    """A barrier of a warp."""
    T.evaluate(T.call_extern("void", "__syncwarp"))


def bf16_pair(low: Any, high: Any) -> Any:
    """Two float32 -> the nearest bfloat16, ties to even, as uint32."""
    return T.call_pure_extern("uint32", "llmc_bf16_pair", low, high)


def bf16_add(a: Any, b: Any) -> Any:
    """Pairs of bfloat16, in uint32 -> the bfloat16 nearest to their sums."""
    return T.call_pure_extern("uint32", "llmc_bf16_add", a, b)


def exp2(x: Any) -> Any:
    """2 ** x, off by 2^-22 of itself at most; smaller than float32 holds with all bits: 0."""
    return T.call_pure_extern("float32", "llmc_exp2", x)


def votes(holds: Any) -> Any:
    """A bit for each lane of the warp, in uint32: whether it holds there. To be held: all lanes vote."""
    return T.call_pure_extern("uint32", "llmc_votes", T.Select(holds, tirx.const(1, "int32"), tirx.const(0, "int32")))


def bits_set(word: Any) -> Any:
    """How many bits of uint32 are 1, as int32."""
    return T.call_pure_extern("int32", "__popc", word)


def half(bits: Any) -> Any:
    """The float16 in the low bits of uint32 -> float32."""
    return T.call_pure_extern("float32", "llmc_half", bits)


def bytes_of(low: Any, high: Any, chosen: int) -> Any:
    """Four of the eight bytes of two words by hexadecimal digits of `chosen`, the lowest byte's last; 4 is high's."""
    return T.call_pure_extern("uint32", "__byte_perm", low, high, chosen)


def word_at(words: Any, bytes: Any) -> Any:
    """The word so many bytes behind the first of an array: where TIR would have them counted in words first."""
    return T.call_pure_extern("uint32", "llmc_word_at", T.address_of(words[0]), bytes)


def value(format: BlockFormat, code: Any) -> Any:
    """The word that a code stands for: `value_words`."""
    return T.call_pure_extern("uint32", f"llmc_value_{format.name}", code)
