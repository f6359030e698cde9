"""What this machine's CPU can do, which library of an artifact fits it, and how many threads it should use."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading.manifest import Package, Variant

_CPUINFO = Path("/proc/cpuinfo")
_ARCH_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}

# https://docs.kernel.org/arch/x86/xstate.html: a process asks once before it touches AMX tiles.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def cpu_arch() -> str:
    """The machine's architecture as the kernel names it, such as x86_64."""
    machine = platform.machine()
    return _ARCH_NAMES.get(machine.lower(), machine)


def cpu_flags() -> frozenset[str]:
    """CPU flags in lower case, from /proc/cpuinfo; empty where there is none."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.lower().split())
    return frozenset()


def missing_flags(variant: Variant, arch: str, flags: frozenset[str]) -> list[str]:
    """What `variant` needs and the machine lacks; empty when it fits."""
    if variant.arch != arch:
        return [f"arch {variant.arch}"]
    missing = sorted(set(variant.requires) - flags)
    if not missing and "amx_tile" in variant.requires and not _allow_amx():
        return ["amx_tile (the kernel refuses its state)"]
    return missing


def choose_variant(manifest: Package, folder: Path) -> Variant:
    """The first variant that this CPU can run. Raises ArtifactError naming what is missing when none can."""
    arch, flags = cpu_arch(), cpu_flags()
    lacking = []
    for variant in manifest.variants:
        missing = missing_flags(variant, arch, flags)
        if not missing:
            return variant
        lacking.append(f"{variant.name} needs {' '.join(missing)}")
    raise ArtifactError(
        f"{folder}: this CPU ({arch}) lacks what the artifact was compiled for: {'; '.join(lacking)}; "
        "compile it with --target cpu:portable or on this machine"
    )


def default_threads() -> int:
    """CPUs this process may use: its affinity mask, cut by the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, _quota() or count))


def _quota() -> int | None:
    """CPUs of the control group's quota, rounded up, or None without one (cgroup v2 cpu.max, v1 cfs)."""
    root = Path("/sys/fs/cgroup")
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        share, of = int(quota), int(period)
    except ValueError:  # "max"
        return None
    return -(-share // of) if share > 0 and of > 0 else None


def _allow_amx() -> bool:
    """Ask the kernel for AMX tile state, for the whole process; asking again is harmless."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
