"""Workers that die, fail or are told to end, and commands that start them: with MPI, and with a stand-in for mpirun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.errors import ArtifactError
from llmc.runtime.workers import launch as launching
from llmc.runtime.workers.launch import launch

pytestmark = pytest.mark.usefixtures("plain_code")

MPIRUN = Path(sys.executable).with_name("mpirun")
LLMC = [sys.executable, "-m", "llmc"]
ENDLESS = ("abc", "--raw", "--max-tokens", "100000", "--endless", "sinks", "--temperature", "0", "--threads", "1")
SHORT = ("abc", "--raw", "--max-tokens", "30", "--temperature", "0", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    """A random model that chats."""
    return tiny_llama(num_hidden_layers=2)


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its artifact for two devices."""
    path = tmp_path_factory.mktemp("launch") / "two.llmc"
    compile_model(folder, path, quant="q8", devices="0&1")
    return path


@pytest.fixture(scope="module")
def one(folder: Path, two: Path) -> Path:
    """Its artifact for one."""
    compile_model(folder, two.with_name("one.llmc"), quant="q8")
    return two.with_name("one.llmc")


@pytest.fixture
def nothing_left(two: Path) -> Iterator[None]:
    """No process and no shared memory of a run stays."""
    shared = set(Path("/dev/shm").glob("mpich_shm_*"))
    yield
    end = time.monotonic() + 5
    while workers_of(two) and time.monotonic() < end:
        time.sleep(0.05)
    assert not workers_of(two)
    ours = (path for path in set(Path("/dev/shm").glob("mpich_shm_*")) - shared if not _in_use(path))
    assert not list(ours)


def workers_of(artifact: Path) -> dict[int, int]:
    """Rank -> process, of what runs the artifact."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
            environment = (folder / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue  # it has ended, or is another's
        ranks = [int(each.split("=")[1]) for each in environment if each.startswith(("PMI_RANK=", "PMIX_RANK="))]
        if str(artifact) in arguments and ranks:
            found[ranks[0]] = int(folder.name)
    return found


def _in_use(path: Path) -> bool:
    maps = (_text(folder / "maps") for folder in Path("/proc").glob("[0-9]*"))
    return any(str(path) in text for text in maps)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def said_by(*arguments: str, before: str = "", **extra: Any) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command."""
    done = subprocess.run([*LLMC, *arguments], capture_output=True, text=True, timeout=60, input=before, **extra)
    return done.returncode, done.stdout, done.stderr


def nothing(out: str) -> bool:
    """Whether no command wrote that. mpirun puts a line end before its words, which passes if it comes by itself."""
    return out in ("", "\n")


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_that_is_killed_is_named(killed: int, two: Path) -> None:
    with subprocess.Popen(
        [*LLMC, "run", "--devices", str(two), *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        run.stdout.read(20)
        os.kill(workers_of(two)[killed], signal.SIGKILL)
        out, said = run.communicate(timeout=5)
    assert run.returncode == 1
    assert said.decode().startswith(f"llmc: worker {killed} (device {killed}) ended: it was killed")
    assert len(said.splitlines()) == 1
    assert b"BAD TERMINATION" not in out


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGKILL", -9)])
def test_workers_end_with_their_launcher(number: str, code: int, two: Path) -> None:
    with subprocess.Popen(
        [*LLMC, "run", "--devices", str(two), *ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        run.stdout.read(20)
        assert len(workers_of(two)) == 2
        run.send_signal(getattr(signal, number))
        _, said = run.communicate(timeout=5)
    assert (run.returncode, said.strip()) == (code, b"")


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_left")
def test_a_worker_that_cannot_load_says_why(two: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.llmc"
    shutil.copytree(two, bad)
    weights = bytearray((bad / "weights.1.safetensors").read_bytes())
    weights[-1] ^= 1
    (bad / "weights.1.safetensors").write_bytes(weights)
    code, out, said = said_by("run", "--devices", str(bad), *SHORT)
    assert code == 1
    assert nothing(out)
    assert said.startswith("llmc: worker 1 (device 1): ")
    assert "weights.1.safetensors: damaged" in said
    assert len(said.splitlines()) == 1


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_step_is_told_and_ends_all(rank: int, two: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        f"if os.environ.get('PMI_RANK') == '{rank}':\n"
        "    from llmc.runtime.errors import RequestError\n"
        "    from llmc.runtime.workers.collectives import Collectives\n"
        "    def all_reduce(*_): raise RequestError('no sum today')\n"
        "    Collectives.all_reduce = all_reduce\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code, out, said = said_by("run", "--devices", str(two), *SHORT, "--json", env={**os.environ, "PYTHONPATH": path})
    assert code == 1
    assert nothing(out)
    assert said.startswith("llmc: the step failed: " if rank == 0 else "llmc: worker 1 (device 1): ")
    assert said.rstrip().endswith("no sum today")
    assert len(said.splitlines()) == 1


@pytest.mark.mpi
@pytest.mark.usefixtures("nothing_left")
def test_weights_are_not_copied_by_several(two: Path) -> None:
    code, out, said = said_by("run", "--devices", str(two), *SHORT, "--copy-weights")
    assert code == 1
    assert nothing(out)
    assert said == "llmc: copy_weights: for an artifact that one process runs on CPUs; a GPU has a copy anyway\n"


@pytest.mark.mpi
def test_commands_run_on_devices(two: Path, one: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    options = ("--text", str(text), "--window", "32", "--windows", "2", "--threads", "1", "--json")
    code, out, said = said_by("eval", "--devices", str(two), *options)
    assert (code, said) == (0, "")
    with llmc.load(one, threads=1) as model:
        alone, ids = model.evaluate(text.read_text(), 32, most_windows=2).figures(), model.encode("abc")
    assert json.loads(out)["perplexity"] == pytest.approx(alone["perplexity"], rel=0.02)

    code, out, _ = said_by("run", "--devices", str(two), "-", *SHORT[1:], "--json", before="abc")
    assert (code, json.loads(out)["prompt_ids"]) == (0, ids)
    code, out, said = said_by("chat", "--devices", str(two), "--json", "--max-tokens", "3", before="one\ntwo\n")
    assert (code, said) == (0, "")
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["length", "length"]


@pytest.mark.thorough
@pytest.mark.mpi
def test_a_bench_has_the_memory_of_all_workers(two: Path) -> None:
    """Rank 0 of what mpirun started starts workers for each row itself, as `llmc bench --devices` does."""
    sizes = ["--prompt-tokens", "8", "--new-tokens", "4", "--batch", "2", "--threads", "1", "--repeats", "1", "--json"]
    command = [str(MPIRUN), "-n", "2", *LLMC, "bench", str(two), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = json.loads(done.stdout)
    assert row["decode_tokens_per_s"] > 0
    assert 10 < row["largest_rss_mb"] < row["peak_rss_mb"] <= 2 * row["largest_rss_mb"]
    weights = sum(path.stat().st_size for path in two.glob("weights.*"))
    assert 0 < row["weight_bytes_per_step"] < weights


# A stand-in for mpirun: it starts so many of what follows with a rank each, and waits for them.
STAND_IN = """
import os, subprocess, sys
count, command = int(sys.argv[2]), sys.argv[3:]
all = [subprocess.Popen(command, env={**os.environ, "PMI_RANK": str(rank)}) for rank in range(count)]
sys.exit(max(abs(each.wait()) for each in all))
"""

WORKER = """
import os, signal, sys, time
from llmc.runtime.workers.member import complain, membership
rank, how = int(os.environ["PMI_RANK"]), sys.argv[1]
if how == "never begins" and rank == 1:
    sys.exit(3)
with membership():
    if how == "is deaf":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        print(rank, flush=True)
        if rank == 1:
            complain("enough")
            os.kill(os.getpid(), signal.SIGSTOP)
    if how == "ends well":
        sys.exit(0)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("ends well", 0, None),
        ("never begins", 1, "worker 1 (device 1) ended before it could begin"),
        ("is deaf", 1, "worker 1 (device 1): enough"),
    ],
)
def test_what_a_launcher_does_with_any_mpirun(
    how: str, code: int, line: str | None, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "played.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(launching, "mpirun", lambda: [sys.executable, str(tmp_path / "stand_in.py")])
    start = time.monotonic()
    assert launch(two, "played", [how]) == (code, line)
    assert time.monotonic() - start < 15
    assert not [pid for pid in _pids() if b"played\0" + how.encode() in _bytes(pid)]


def _pids() -> list[str]:
    return [folder.name for folder in Path("/proc").glob("[0-9]*")]


def _bytes(pid: str) -> bytes:
    try:
        return Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return b""


def test_what_cannot_be_launched_is_refused(one: Path, two: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ArtifactError, match="compiled for one device"):
        launch(one, "llmc", [])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArtifactError, match="wants mpirun, which is not on PATH"):
        launch(two, "llmc", [])
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in launching._ROOT:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ArtifactError, match="OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"):
        launch(two, "llmc", [])
