"""A CUDA target: what a generation of chips can do, as facts. Kernels ask for these, never for a name."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

from llmc.targets.knobs import Knobs

WARP = 32  # threads that run together, on every chip there is
STATIC_SHARED_BYTES = 48 << 10  # of shared memory that a block may have without asking the driver for more


@dataclass(frozen=True)
class CudaTarget:
    """Facts of one generation of chips. Code for (major, minor) runs on chips of that major and no lower minor.

    Numbers: CUDA C++ Programming Guide 13.0, tables "Feature support" and "Technical specifications per compute
    capability". `requires` are facts that a machine's driver and device have to meet (runtime/loading/cuda.py).
    """

    compute: tuple[int, int]  # compute capability
    shared_bytes: int  # the most shared memory a block may ask for
    multiprocessor_threads: int  # threads that a multiprocessor holds at once
    multiprocessors: int  # of the largest chip: blocks that stay are as many, on chips with fewer some wait
    fp8: bool = False  # tensor cores take 8-bit floats
    wgmma: bool = False  # tensor cores take operands of four warps, out of shared memory
    early_launch: bool = False  # a kernel may begin before the one in front of it has ended, and wait inside
    registers: int = 65536  # of 32 bits, of a multiprocessor
    thread_registers: int = 255  # the most that one thread may have
    block_threads: int = 1024
    async_copy: bool = True  # global to shared memory without passing through registers
    # (m, n, k) of the product that a warp's tensor cores do with bfloat16 operands and float32 sums.
    tensor_core: tuple[int, int, int] = (16, 8, 16)
    arch: str = field(default_factory=platform.machine)  # of the machine beside the GPU
    knobs: Knobs = Knobs()

    @property
    def chip(self) -> str:
        """As nvcc spells it."""
        return f"sm_{self.compute[0]}{self.compute[1]}"

    @property
    def code(self) -> str:
        """What nvcc compiles for: with `a`, instructions that no later chip has; `wgmma` is one."""
        return self.chip + "a" * self.wgmma

    @property
    def name(self) -> str:
        """Of the variant in an artifact."""
        return f"cuda-{self.chip}"

    @property
    def requires(self) -> tuple[str, ...]:
        """What the manifest says a machine needs."""
        return ("cuda", self.chip)

    @property
    def int8_activations(self) -> bool:
        """Whether kernels of quantized weights do better with activations rounded to int8: not so far."""
        return False

    @property
    def bf16_activations(self) -> bool:
        """Whether kernels of quantized weights do better with activations rounded to bfloat16: half the products."""
        return True

    @property
    def turns_in_attention(self) -> bool:
        """Whether kernels of attention turn queries and keys themselves (passes/fuse_rope.py)."""
        return True

    @property
    def rounds_attention(self) -> bool:
        """Whether attention, as norms and activations do, can give bfloat16 (passes/fuse_rounding.py)."""
        return True

    @property
    def rounded_columns(self) -> int:
        """Of how many columns, or a multiple, are results that norms and activations can give as bfloat16."""
        return 2

    def joins_rounded(self, format: str, columns: int) -> bool:
        """Whether an activation that gives bfloat16 is one kernel with a matrix in this format, of so many columns."""
        return True

    def serves(self, other: object) -> bool:
        """Whether code made of the same kernels for this target is as good on the other's machines as its own."""
        return False

    @property
    def linker(self) -> str:
        """The compiler driver that links the host's side."""
        return "gcc" if self.arch == platform.machine() else f"{self.arch}-linux-gnu-gcc"

    def tvm(self) -> Any:
        """The TVM target: this chip, with plain code of the host's architecture beside it."""
        import tvm

        host: dict[str, Any] = {"kind": "llvm", "mtriple": f"{self.arch}-linux-gnu"}
        if self.arch == "x86_64":
            host["mcpu"] = "x86-64"
        chip = {"kind": "cuda", "arch": self.chip, "max_threads_per_block": self.block_threads}
        return tvm.target.Target(chip, host=host)


_CHIPS = (
    CudaTarget((8, 0), 163 << 10, 2048, 108),
    CudaTarget((8, 6), 99 << 10, 1536, 84),
    CudaTarget((8, 9), 99 << 10, 1536, 142, fp8=True),
    CudaTarget((9, 0), 227 << 10, 2048, 132, fp8=True, wgmma=True, early_launch=True),
)
CUDA_TARGETS = {f"cuda:{chip.chip}": chip for chip in _CHIPS}
