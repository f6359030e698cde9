"""`llmc doctor`: what this machine and this installation can do."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from llmc import __version__
from llmc.console import json_option, print_json, print_table, words_for_bytes

# extra -> the distributions that make it; "" is the runtime every installation has
_EXTRAS = {
    "": ("apache-tvm-ffi", "numpy", "tokenizers", "safetensors", "jinja2", "click", "rich"),
    "compile": ("apache-tvm", "gguf"),
    "dev": ("torch", "transformers", "pytest", "hypothesis", "mypy", "ruff", "build"),
}

# The flags that some variant of a compiled library asks for; the rest of /proc/cpuinfo is noise.
_FLAGS = (
    ("sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", "avx_vnni")
    + ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi", "avx512_bf16")
    + ("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16")
    + ("asimd", "asimddp", "i8mm", "bf16", "sve")
)


@click.command(
    short_help="Show what this machine and installation can do.",
    epilog="""\b
Examples:
  llmc doctor
  llmc doctor --json""",
)
@json_option
def doctor(as_json: bool) -> None:
    """Show versions, CPU features, cores, memory and which extras are installed."""
    facts = collect()
    if as_json:
        print_json(facts)
        return
    memory = facts["memory"]
    rows = [
        ("llmc", facts["llmc"]),
        ("python", f"{facts['python']} ({facts['platform']})"),
        ("cpu", facts["cpu"]["model"]),
        ("cores", f"{facts['cpu']['cores_allowed']} allowed of {facts['cpu']['cores']}"),
        ("flags", " ".join(facts["cpu"]["flags"]) or "none that llmc uses"),
        ("variants", ", ".join(facts["cpu"]["variants"]) or "none"),
        ("memory", f"{_size(memory['available'])} available of {_size(memory['total'])}"),
    ]
    for name, extra in facts["extras"].items():
        found = ", ".join(f"{k} {v}" for k, v in extra["versions"].items() if v is not None)
        lacks = ", ".join(k for k, v in extra["versions"].items() if v is None)
        state = found if extra["installed"] else f"lacks {lacks}"
        rows.append((f"llmc[{name}]" if name else "runtime", state))
    rows += [(name, value) for name, value in facts["environment"].items()]
    print_table(rows)


def _size(count: int | None) -> str:
    return "?" if count is None else words_for_bytes(count)


def collect() -> dict[str, Any]:
    """Return everything `llmc doctor` shows; nothing here imports a compiler."""
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    model, flags = _cpu()
    variants = _variants()
    extras = {name: _extra(distributions) for name, distributions in _EXTRAS.items()}
    return {
        "llmc": __version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "cpu": {"model": model, "flags": flags, "cores": cores, "cores_allowed": allowed, "variants": variants},
        "memory": _memory(),
        "extras": extras,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("LLMC_")},
    }


def _variants() -> list[str]:
    """Return what this CPU can run of a portable artifact, best first: a loader takes the first."""
    from llmc.runtime.loading.cpu import cpu_arch, cpu_flags
    from llmc.targets.target import ARCHITECTURES, variants

    arch, flags = cpu_arch(), cpu_flags()
    return [v.name for v in variants(arch) if flags.issuperset(v.requires)] if arch in ARCHITECTURES else []


def _cpu() -> tuple[str, list[str]]:
    """Return the CPU's name and those of its flags that matter here."""
    fields: dict[str, str] = {}
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    have = set(fields.get("flags", fields.get("features", "")).split())
    model = fields.get("model name") or platform.processor() or platform.machine()
    return model, [flag for flag in _FLAGS if flag in have]


def _memory() -> dict[str, int | None]:
    """Return bytes of memory, no more than the control group allows."""
    fields = {line.partition(":")[0]: line.split() for line in _lines("/proc/meminfo")}
    total, available = (
        int(fields[name][1]) * 1024 if name in fields else None for name in ("MemTotal", "MemAvailable")
    )
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = next(iter(_lines(path)), "").strip()
        if limit.isdigit() and total is not None and available is not None:
            total, available = min(total, int(limit)), min(available, int(limit))
    return {"total": total, "available": available}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _extra(distributions: tuple[str, ...]) -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"installed": None not in versions.values(), "versions": versions}
