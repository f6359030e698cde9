"""What kernels call that CUDA C++ has no plain words for: a few device functions, put in front of TVM's source.

Each has a caller here, and its meaning in NumPy in tests/cuda/cuda_threads.py.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

# PTX ISA 8.0, "mma.m16n8k16" for .bf16: lane 4 g + q has of A (16 rows, 16 k) rows g and g + 8, and of B (16 k, 8
# columns) column g, each at k of 2q, 2q + 1, 2q + 8, 2q + 9; of the sums rows g and g + 8 at columns 2q and 2q + 1.
PRELUDE = """\
static __device__ __forceinline__ void llmc_mma_m16n8k16_bf16(float* sums, const unsigned* a, const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ __forceinline__ unsigned llmc_bf16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
"""


def mma(sums: Any, a: Any, b: Any) -> None:
    """sums (16, 8) += a (16, 16) @ b (16, 8) of bfloat16 pairs, by a whole warp: each the first word of a lane's."""
    T.evaluate(T.call_extern("void", "llmc_mma_m16n8k16_bf16", *(T.address_of(each) for each in (sums, a, b))))


def bf16_pair(low: Any, high: Any) -> Any:
    """Two float32 -> the nearest bfloat16, ties to even, as uint32."""
    return T.call_pure_extern("uint32", "llmc_bf16_pair", low, high)
