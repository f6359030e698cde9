"""A target: what a machine can do, as facts. Kernels and passes ask for capabilities, never for a name."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, GROUP, BlockFormat
from llmc.targets.cuda.target import CUDA_TARGETS, CudaTarget
from llmc.targets.knobs import Knobs

# Linux's name of a CPU flag -> LLVM's. Only what a kernel asks for, or what plain code gains from.
_FEATURES = {
    "x86_64": {
        "ssse3": "ssse3",
        "sse4_1": "sse4.1",
        "sse4_2": "sse4.2",
        "popcnt": "popcnt",
        "avx": "avx",
        "avx2": "avx2",
        "fma": "fma",
        "avx_vnni": "avxvnni",
        "f16c": "f16c",
        "avx512f": "avx512f",
        "avx512bw": "avx512bw",
        "avx512dq": "avx512dq",
        "avx512vl": "avx512vl",
        "avx512_vnni": "avx512vnni",
        "avx512vbmi": "avx512vbmi",
        "avx512_bf16": "avx512bf16",
        "amx_tile": "amx-tile",
        "amx_int8": "amx-int8",
        "amx_bf16": "amx-bf16",
    },
    "aarch64": {"asimd": "neon", "asimddp": "dotprod", "i8mm": "i8mm"},
}
# Those of them that nothing uses but a kernel that asks for them: without such a kernel code is the same.
_TILES = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_ASKED_FOR = frozenset({"avx_vnni", "avx512_vnni", "avx512vbmi", "avx512_bf16", "asimddp", "i8mm"}) | _TILES
_AVX2 = ("ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_MANY_PAIRS = 64  # of a table: so many take long to look up in where no instruction permutes 64 bytes
# Flag -> vectors of sixteen float32 that registers hold, where that is more than 4, the most first.
_VECTORS = {"avx512f": 32, "avx2": 8, "asimd": 8}

# Architecture -> the variants of a portable artifact and the flags each needs, best first: a loader takes the first
# that fits. The last one runs on every CPU of the architecture.
_VARIANTS = {
    "x86_64": {
        "cpu-amx_int8": (*_AVX512, "avx512_vnni", "avx512vbmi", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
        "cpu-avx512_bf16": (*_AVX512, "avx512_vnni", "avx512vbmi", "avx512_bf16"),
        "cpu-avx512_vbmi": (*_AVX512, "avx512_vnni", "avx512vbmi"),
        "cpu-avx512_vnni": (*_AVX512, "avx512_vnni"),
        "cpu-avx512f": _AVX512,
        "cpu-avx_vnni": (*_AVX2, "avx_vnni"),
        "cpu-avx2": _AVX2,
        "cpu-x86_64": (),
    },
    "aarch64": {
        "cpu-i8mm": ("asimd", "asimddp", "i8mm"),
        "cpu-asimddp": ("asimd", "asimddp"),
        "cpu-aarch64": ("asimd",),
    },
}
ARCHITECTURES = tuple(_VARIANTS)


@dataclass(frozen=True)
class Target:
    """Facts of one CPU variant.

    `requires` are CPU flags as Linux spells them; a machine without all of them must not run the code.
    """

    name: str
    arch: str  # "x86_64" or "aarch64"
    requires: tuple[str, ...]
    knobs: Knobs = Knobs()

    @property
    def int8_activations(self) -> bool:
        """Whether kernels of quantized weights do better with activations rounded to int8."""
        return True

    @property
    def bf16_activations(self) -> bool:
        """Whether kernels of quantized weights do better with activations rounded to bfloat16: not on CPUs."""
        return False

    @property
    def turns_in_attention(self) -> bool:
        """Whether kernels of attention turn queries and keys themselves (passes/fuse_rope.py): not on CPUs."""
        return False

    @property
    def rounds_attention(self) -> bool:
        """Whether attention, as norms and activations do, can give bfloat16 (passes/fuse_rounding.py): not on CPUs."""
        return False

    @property
    def rounded_columns(self) -> int:
        """Of how many columns, or a multiple, are results that norms and activations can give as bfloat16."""
        return GROUP

    @property
    def has_bf16_tiles(self) -> bool:
        """Whether there are tiles that multiply weights unpacked to bfloat16."""
        return all(self.has(flag) for flag in ("amx_tile", "amx_bf16", "avx512f", "avx512bw"))

    def joins_rounded(self, format: str, columns: int) -> bool:
        """Whether an activation that gives bfloat16 is one kernel with a matrix in this format, of so many columns:
        where such tiles multiply it.
        """
        blocks = isinstance(FORMATS[format], BlockFormat)
        return self.has_bf16_tiles and blocks and columns % GROUP == 0

    @property
    def linker(self) -> str:
        """The compiler driver that links a shared library for this architecture."""
        return "gcc" if self.arch == platform.machine() else f"{self.arch}-linux-gnu-gcc"

    def has(self, flag: str) -> bool:
        """Whether generated code may use this CPU flag."""
        return flag in self.requires

    def looks_up_slowly(self, name: str) -> bool:
        """Whether looking codes up takes most of a row's time: with AVX2 such a row takes two to three times as long
        as one of q4 (docs/measured/avx2.md).
        """
        format = FORMATS[name]
        if self.arch != "x86_64" or self.permutes_bytes or not isinstance(format, BlockFormat):
            return False
        return format.pair and format.top >= _MANY_PAIRS - 1 and not format.base

    @property
    def permutes_bytes(self) -> bool:
        """Whether one instruction looks 64 bytes up in a table."""
        return self.has("avx512vbmi") and self.has("avx512bw")

    @property
    def vectors(self) -> int:
        """How many vectors of sixteen float32 the machine's registers hold."""
        return next((count for flag, count in _VECTORS.items() if self.has(flag)), 4)

    def serves(self, other: AnyTarget) -> bool:
        """Whether code made of the same kernels for this target is as good on the other's machines as its own."""
        if not isinstance(other, Target) or self.arch != other.arch:
            return False
        return set(self.requires) == set(other.requires) - (_ASKED_FOR - set(self.requires))

    def llvm(self) -> Any:
        """The TVM target: the feature list, never a CPU's name (hypervisors report wrong models)."""
        import tvm

        features = ["+" + _FEATURES[self.arch][flag] for flag in self.requires]
        if self.has("avx512f"):
            features.append("-prefer-256-bit")
        config: dict[str, Any] = {"kind": "llvm", "mtriple": f"{self.arch}-linux-gnu"}
        if self.arch == "x86_64":
            config["mcpu"] = "x86-64"
        return tvm.target.Target(config | ({"mattr": features} if features else {}))


def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """Flags of this machine's first CPU, from /proc/cpuinfo (or from its text)."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            found = frozenset(value.split())
            return found - _TILES if cpuinfo is None and found & _TILES and not _allow_tiles() else found
    return frozenset()


def _allow_tiles() -> bool:
    """Ask the kernel for tile state, as every process must that runs such code (runtime/loading/cpu.py says more)."""
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(158, 0x1023, 18) == 0)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


def native(flags: frozenset[str] | None = None, arch: str | None = None) -> Target:
    """One variant with all that a CPU with these flags can do (default: this machine)."""
    arch = arch or platform.machine()
    found = cpu_flags() if flags is None else flags
    fitting = [variant for variant in variants(arch) if found.issuperset(variant.requires)]
    if len(fitting) < 2:  # a vector width without fused multiply-add is not worth a variant
        return baseline(arch)
    best = fitting[0]
    if arch != "x86_64":
        return best
    usable = [flag for flag in _FEATURES[arch] if flag in found]
    if not found.issuperset(_AVX512):
        usable = [flag for flag in usable if not flag.startswith("avx512")]
    return Target(best.name, arch, tuple(usable))


def variants(arch: str) -> tuple[Target, ...]:
    """Those that together run on any CPU of the architecture, best first; the last has no needs of its own."""
    if arch not in _VARIANTS:
        raise LlmcError(f"no target for architecture {arch!r}; llmc knows: {', '.join(_VARIANTS)}")
    *better, (last, plain) = _VARIANTS[arch].items()
    return (
        *(Target(name, arch, requires) for name, requires in better),
        Target(last, arch, plain, Knobs(prefetch_bytes=0, prefetch_far_bytes=0)),
    )


def baseline(arch: str) -> Target:
    """What every CPU of the architecture can do."""
    return variants(arch)[-1]


TARGETS = {
    "cpu": "this machine's CPU, all of its features",
    "cpu:native": "the same",
    "cpu:portable": "any CPU of this machine's architecture: several variants, the best one chosen at load",
    "cpu:x86_64": "any x86-64 CPU, likewise",
    "cpu:aarch64": "any 64-bit Arm CPU, likewise",
    "cpu:baseline": "any CPU of this machine's architecture, by one variant",
}
AnyTarget = Target | CudaTarget


def get(names: str) -> tuple[AnyTarget, ...]:
    """The variants that a `--target` string names, best first: those of GPUs, then those of CPUs.

    With commas between them, each of TARGETS, cpu:NAME for the variant cpu-NAME, or one of CUDA_TARGETS. Raises
    LlmcError listing all of them, and for names that cannot go into one artifact.
    """
    each = [name.strip() for name in names.split(",")]
    devices = [CUDA_TARGETS[name] for name in each if name in CUDA_TARGETS]
    others = [name for name in each if name not in CUDA_TARGETS]
    if len(others) > 1 or len(set(each)) < len(each):
        raise LlmcError(f"target {names!r}: one target for CPUs at most (cpu:portable is several), and each only once")
    chosen: tuple[AnyTarget, ...] = (*devices, *(variant for name in others for variant in get_cpu(name)))
    if len({target.arch for target in chosen}) > 1:
        raise LlmcError(f"target {names!r}: all are for one architecture; a GPU's host is of this machine's")
    return chosen


def cpus(chosen: Sequence[AnyTarget]) -> tuple[Target, ...]:
    """Those that are CPUs."""
    return tuple(target for target in chosen if isinstance(target, Target))


def gpus(chosen: Sequence[AnyTarget]) -> tuple[CudaTarget, ...]:
    """Those that are GPUs."""
    return tuple(target for target in chosen if isinstance(target, CudaTarget))


def get_cpu(name: str) -> tuple[Target, ...]:
    """The same where only a CPU will do."""
    alone = {variant.name.replace("-", ":", 1): variant for arch in _VARIANTS for variant in variants(arch)}
    if name not in TARGETS and name not in alone:
        raise LlmcError(f"unknown target {name!r}; llmc knows: {', '.join(TARGETS | alone | CUDA_TARGETS)}")
    _, _, kind = name.partition(":")
    if kind in ("", "native"):
        return (native(),)
    if kind == "baseline":
        return (baseline(platform.machine()),)
    if name not in TARGETS:
        return (alone[name],)
    return variants(platform.machine() if kind == "portable" else kind)


def for_kind(chosen: Sequence[AnyTarget], kind: str) -> tuple[AnyTarget, ...]:
    """Those that a device of this kind, cpu or cuda, runs; all for no kind: whatever is compiled for."""
    if not kind:
        return tuple(chosen)
    return cpus(chosen) if kind == "cpu" else gpus(chosen)
