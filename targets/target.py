"""A target: what a machine can do, as facts. Kernels and passes ask for capabilities, never for a name."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.targets.knobs import Knobs

# Linux's name of a CPU flag -> LLVM's. Only what a kernel asks for, or what plain code gains from.
_X86_FEATURES = {
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
}
_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


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
    def linker(self) -> str:
        """The compiler driver that links a shared library for this architecture."""
        return "gcc" if self.arch == platform.machine() else f"{self.arch}-linux-gnu-gcc"

    def has(self, flag: str) -> bool:
        """Whether generated code may use this CPU flag."""
        return flag in self.requires

    def llvm(self) -> Any:
        """The TVM target: the feature list, never a CPU's name (hypervisors report wrong models)."""
        import tvm

        if self.arch == "aarch64":
            return tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]})
        features = ["+" + _X86_FEATURES[flag] for flag in self.requires]
        if self.has("avx512f"):
            features.append("-prefer-256-bit")
        config: dict[str, Any] = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"}
        return tvm.target.Target(config | ({"mattr": features} if features else {}))


def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """Flags of this machine's first CPU, from /proc/cpuinfo (or from its text)."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def native(flags: frozenset[str] | None = None, arch: str | None = None) -> Target:
    """The best variant for a CPU with these flags (default: this machine)."""
    arch = arch or platform.machine()
    if arch != "x86_64":
        return portable(arch)
    found = cpu_flags() if flags is None else flags
    usable = [flag for flag in _X86_FEATURES if flag in found]
    if not found >= _AVX512:
        usable = [flag for flag in usable if not flag.startswith("avx512")]
    if "fma" not in usable:  # a vector width without fused multiply-add is not worth a variant
        return portable(arch)
    best = next(f for f in ("avx512_vnni", "avx512f", "avx2", "fma") if f in usable)
    return Target(f"cpu-{best}", arch, tuple(usable))


def portable(arch: str) -> Target:
    """No intrinsics beyond the architecture's baseline."""
    if arch not in ("x86_64", "aarch64"):
        raise LlmcError(f"no target for architecture {arch!r}; llmc knows: x86_64, aarch64")
    return Target(f"cpu-portable-{arch}", arch, (), Knobs(prefetch_bytes=0))


TARGETS = {
    "cpu": "this machine's CPU, all of its features",
    "cpu:portable": "any CPU of this machine's architecture",
    "cpu:x86_64": "any x86-64 CPU",
    "cpu:aarch64": "any 64-bit Arm CPU (cross-compiled)",
}


def get(name: str) -> Target:
    """The target a `--target` string names."""
    if name not in TARGETS:
        raise LlmcError(f"unknown target {name!r}; llmc knows: {', '.join(TARGETS)}")
    if name == "cpu":
        return native()
    _, _, kind = name.partition(":")
    return portable(platform.machine() if kind == "portable" else kind)
