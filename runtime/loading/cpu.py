"""What this machine's CPU can do, which library of an artifact fits it, and how many threads it should use.

`LLMC_VARIANT` names the library to take instead, for tests and reports of bugs.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import cuda
from llmc.runtime.loading.package import Package, Variant

_CPUINFO = Path("/proc/cpuinfo")
_ARCH_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}

# Flag -> (AT_HWCAP or AT_HWCAP2, its bit): Linux, arch/arm64/include/uapi/asm/hwcap.h.
_ARM_FLAGS = {
    "fp": (16, 0), "asimd": (16, 1), "fphp": (16, 9), "asimdhp": (16, 10), "asimddp": (16, 20), "sve": (16, 22),
    "sve2": (26, 1), "svei8mm": (26, 9), "i8mm": (26, 13), "bf16": (26, 14),
}  # fmt: skip

# https://docs.kernel.org/arch/x86/xstate.html: a process asks once before it touches AMX tiles.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def cpu_arch() -> str:
    """The machine's architecture as the kernel names it, such as x86_64."""
    machine = platform.machine()
    return _ARCH_NAMES.get(machine.lower(), machine)


def cpu_flags() -> frozenset[str]:
    """CPU flags in lower case, as /proc/cpuinfo spells them; empty where there are none."""
    if cpu_arch() == "aarch64":
        return _arm_flags()
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.lower().split())
    return frozenset()


def _arm_flags() -> frozenset[str]:
    """From the auxiliary vector: /proc/cpuinfo has one core's, and under an emulator the host's."""
    words = {word: _auxiliary(word) for word, _ in _ARM_FLAGS.values()}
    return frozenset(flag for flag, (word, bit) in _ARM_FLAGS.items() if words[word] >> bit & 1)


def _auxiliary(word: int) -> int:
    """getauxval(3); 0 where the C library has none."""
    get = getattr(ctypes.CDLL(None), "getauxval", None)
    if get is None:
        return 0
    get.argtypes, get.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(get(word))


def missing_flags(variant: Variant, arch: str, flags: frozenset[str], number: int | None = None) -> list[str]:
    """What `variant` needs and the machine lacks; empty when it fits. `number`: of the GPU that it is to run on."""
    if variant.arch != arch:
        return [f"arch {variant.arch}"]
    if variant.device is not None:
        return cuda.lacking(variant.device, number)
    missing = sorted(set(variant.requires) - flags)
    if not missing and "amx_tile" in variant.requires and not _allow_amx():
        return ["amx_tile (the kernel refuses its state)"]
    return missing


def choose_variant(manifest: Package, folder: Path) -> Variant:
    """The first variant that this CPU can run, or the one that LLMC_VARIANT names.

    Raises ArtifactError naming what is missing when there is none, or when the one named does not run here.
    """
    arch, flags, forced = cpu_arch(), cpu_flags(), forced_variant()
    if forced in manifest.variants_elsewhere:
        forced = None
    lacking = []
    for variant in manifest.variants:
        if forced not in (None, variant.name):
            continue
        missing = missing_flags(variant, arch, flags)
        if not missing:
            return variant
        lacking.append(f"{variant.name} needs {(' ' if variant.device is None else ', ').join(missing)}")
    if forced is None and all(variant.device is not None for variant in manifest.variants):
        raise ArtifactError(
            f"{folder}: only compiled for GPUs: {'; '.join(lacking)}; for CPUs, compile it with --target cpu"
        )
    if forced is None:
        raise ArtifactError(
            f"{folder}: this CPU ({arch}) lacks what the artifact was compiled for: {'; '.join(lacking)}; "
            "compile it with --target cpu:portable or on this machine"
        )
    if lacking:
        raise ArtifactError(f"{folder}: LLMC_VARIANT: this CPU ({arch}) cannot run it: {'; '.join(lacking)}")
    names = ", ".join(variant.name for variant in manifest.variants)
    raise ArtifactError(f"{folder}: LLMC_VARIANT={forced[:80]}: no such variant; it has {names}")


def forced_variant() -> str | None:
    """`LLMC_VARIANT`: the name of the variant to take, whichever is the best."""
    return os.environ.get("LLMC_VARIANT") or None


def fitting_variant(missing: dict[str, list[str]], elsewhere: frozenset[str] = frozenset()) -> str | None:
    """The name `choose_variant` would find, of variants in order and what each lacks; None when there is none."""
    forced = None if forced_variant() in elsewhere else forced_variant()
    names = [name for name, lacking in missing.items() if not lacking and forced in (None, name)]
    return names[0] if names else None


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
