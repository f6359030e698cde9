"""What a process may still take of the memory: the system's, and that of the control groups it is in."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.runtime import memory

GB = 1 << 30


@pytest.fixture(params=["python", "native"])
def available_bytes(request: pytest.FixtureRequest) -> Callable[[Path], int]:
    """What each of the runtimes finds out from a system's files."""
    if request.param == "python":
        return memory.available_bytes
    probe = request.getfixturevalue("native") / "llmc" / "native_probe"
    return lambda root: int(subprocess.check_output([probe, "available", f"{root}/"]))


def system(root: Path, groups: str = "0::/") -> Path:
    """Files of a system with 8 GB available, whose process is in these groups."""
    write(root, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    write(root, "proc/self/cgroup", groups + "\n")
    return root


def write(root: Path, name: str, text: str | int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def group(root: Path, name: str, limit: str | int, used: int, cached: int = 0) -> None:
    """A control group of version 2."""
    write(root, f"sys/fs/cgroup/{name}/memory.max", limit)
    write(root, f"sys/fs/cgroup/{name}/memory.current", used)
    stat = f"anon {used - cached}\ninactive_file {cached - 10}\nactive_file 10\n"
    write(root, f"sys/fs/cgroup/{name}/memory.stat", stat)


def test_without_limits_it_is_what_the_system_says(available_bytes: Callable[[Path], int], tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path)) == 8 * GB
    group(tmp_path, "", "max", 3 * GB)
    assert available_bytes(tmp_path) == 8 * GB


@pytest.mark.parametrize("place", ["", "user", "user/app"])
def test_a_limit_of_a_group_or_of_one_around_it_counts(
    place: str, available_bytes: Callable[[Path], int], tmp_path: Path
) -> None:
    system(tmp_path, "0::/user/app")
    for name in ("", "user", "user/app"):
        group(tmp_path, name, "max", GB)
    group(tmp_path, place, 4 * GB, 3 * GB, cached=2 * GB)
    assert available_bytes(tmp_path) == 3 * GB  # files are let go for it


def test_a_group_that_uses_all_it_may_leaves_nothing(available_bytes: Callable[[Path], int], tmp_path: Path) -> None:
    group(system(tmp_path), "", GB, 2 * GB)
    assert available_bytes(tmp_path) == 0


def test_groups_of_version_1_count(available_bytes: Callable[[Path], int], tmp_path: Path) -> None:
    system(tmp_path, "5:cpu,memory:/app\n0::/")
    for folder in ("", "app"):
        limit, used = ((1 << 63) - 4096, 5 * GB) if not folder else (2 * GB, GB)
        write(tmp_path, f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", limit)
        write(tmp_path, f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", used)
        write(tmp_path, f"sys/fs/cgroup/memory/{folder}/memory.stat", "total_active_file 0\ntotal_inactive_file 7\n")
    assert available_bytes(tmp_path) == GB + 7


def test_what_cannot_be_read_is_no_limit(available_bytes: Callable[[Path], int], tmp_path: Path) -> None:
    write(system(tmp_path), "sys/fs/cgroup/memory.max", GB)  # and nothing of what is used
    assert available_bytes(tmp_path) == 8 * GB
    assert available_bytes(tmp_path / "none") > 0
