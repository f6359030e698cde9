"""What `llmc plan --measure` learns of messages between two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.runtime.errors import ArtifactError
from llmc.runtime.workers import launch


@pytest.mark.mpi
def test_two_processes_say_how_quick_they_are() -> None:
    command = [*launch.mpirun(), "-n", "2", sys.executable, "-m", "llmc.runtime.workers.pingpong"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 1e-7 < found["latency_s"] < 1
    assert found["bytes_per_s"] > 1e6
    assert 0 <= found["wake_s"] < 1
    assert 0 <= found["unsteady"] < 10


def test_alone_it_says_how_to_start_it() -> None:
    command = [sys.executable, "-m", "llmc.runtime.workers.pingpong"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1
    assert "start it with mpirun -n 2" in done.stderr


def test_without_mpirun_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match="wants mpirun, which is not on PATH"):
        launch.mpirun()
