"""Memory of the system: what a process may still take of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LARGE_PAGE = 2 << 20  # bytes, where the system has larger pages than of 4 KB for who asks
MAP_NORESERVE = 0x4000 if os.name == "posix" else 0  # mmap.MAP_NORESERVE, named since Python 3.13

# Files of a control group, versions 2 and 1: its limit, what it uses, and what of that are files that can be let go.
_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)  # fmt: skip


def available_bytes(root: Path = Path("/")) -> int:
    """What programs may still take, as the system guesses, and no more than a control group allows, as of a container.

    `root`: where the system's own files are.
    """
    return max(0, min(_of_system(root), *_of_groups(root)))


def _of_system(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(root: Path) -> Iterator[int]:
    """What is left in each group with a limit that this process is in; 2^63 first, for when it is in none."""
    yield 1 << 63
    named = ["/"]  # in a container the group's own name is often not that of a folder there
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            named += [name] if kinds == "" or "memory" in kinds.split(",") else []
    for folder, limit, used, files in _GROUPS:
        whole = root / folder
        for group in {whole / parent for name in named for parent in _with_parents(name)}:
            with contextlib.suppress(OSError, ValueError):
                left = int((group / limit).read_text()) - int((group / used).read_text())  # "max" is no number
                yield left + _listed(group / "memory.stat", files)


def _with_parents(name: str) -> list[str]:
    """A group's folder, below where all are, and those that it is in."""
    inner = Path(name.strip("/"))
    return [str(each) for each in (inner, *inner.parents)]


def _listed(path: Path, names: tuple[str, ...]) -> int:
    """The sum of these numbers in a file of names and numbers."""
    lines = (line.split() for line in path.read_text().splitlines())
    return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in names)
