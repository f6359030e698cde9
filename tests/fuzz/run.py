"""Feeds changed inputs to the readers of untrusted files: each must be read or be refused, in little time and memory.

    python tests/fuzz/run.py --reader gguf --count 1000000 --seed 1

Input i of a seed is always the same, so a failure is repeated by `--first I --count 1`. A failure is anything but the
package's own error in one line: another exception, more than a second of the processor, more memory than `--memory`, or
an attempt to start a process, unpickle or connect.
"""

from __future__ import annotations

import argparse
import functools
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from readers import READERS, Reader

from llmc.compiler.errors import LlmcError

__all__ = ["READERS", "LlmcError", "fuzz"]

SECONDS = 1.0  # of the processor for one input
HANGS = 60  # seconds after which an input is given up
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class",
              "socket.connect", "os.remove", "os.rename", "shutil.rmtree", "ctypes.dlopen")  # fmt: skip


@dataclass
class Counts:
    """What became of the inputs."""

    read: int = 0
    refused: int = 0
    slowest: float = 0.0  # seconds


class _Watch:
    """Remembers what a reader must not do: an audit hook cannot be taken away, so there is one for all."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in _FORBIDDEN:
            self.seen.append(f"{event} {arguments!r:.100}")


WATCH = _Watch()


def fuzz(name: str, count: int, seed: int, first: int = 0, report: bool = False) -> tuple[Counts, list[str]]:
    """What became of `count` inputs from number `first` on, and a line for each failure (at most 20)."""
    signal.signal(signal.SIGALRM, _hung)
    counts, failures = Counts(), []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        reader = READERS[name](Path(folder))
        for sample in reader.samples:
            reader.lay(sample)
            reader.read(sample)  # valid inputs are read
        for number in range(first, first + count):
            problem = _one(reader, Random(seed << 40 | number), counts)
            if problem:
                failures.append(f"--reader {name} --seed {seed} --first {number} --count 1: {problem}")
                if len(failures) >= 20:
                    break
            if report and (number + 1 - first) % 50000 == 0:
                print(f"{name} {number + 1 - first} {counts}", file=sys.stderr, flush=True)
    return counts, failures


def _one(reader: Reader, random: Random, counts: Counts) -> str | None:
    data = reader.make(random)
    reader.lay(data)
    start = time.process_time()
    WATCH.seen.clear()
    try:
        WATCH.on = True
        signal.alarm(HANGS)
        reader.read(data)
        counts.read += 1
    except reader.refusals as error:
        counts.refused += 1
        if "\n" in str(error) or not str(error) or len(str(error)) > 20000:
            return f"its message is not one line: {str(error)[:200]!r}"
    except Exception:
        return "\n".join(line[:300] for line in traceback.format_exc(limit=-4).splitlines())
    finally:
        signal.alarm(0)
        WATCH.on = False
    taken = time.process_time() - start
    counts.slowest = max(counts.slowest, taken)
    if taken > SECONDS:
        return f"took {taken:.2f} s"
    return f"did {WATCH.seen[0]}" if WATCH.seen else None


def _hung(*_: object) -> None:
    raise TimeoutError(f"no answer in {HANGS} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", required=True, choices=[*READERS, "all"])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--memory", type=int, default=1 << 30, help="bytes beyond what the program has at the start")
    options = parser.parse_args()
    _remember_families()
    bad = False
    for name in READERS if options.reader == "all" else [options.reader]:
        start = time.monotonic()
        _limit(options.memory)
        counts, failures = fuzz(name, options.count, options.seed, options.first, report=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        numbers = [counts.read + counts.refused, counts.read, counts.refused, round(counts.slowest * 1000), peak]
        print(f"| `{name}` | {' | '.join(f'{number:,}' for number in numbers)} |", flush=True)  # a row of the page
        seconds = time.monotonic() - start
        print(f"{name}: {len(failures)} failures, {seconds:.0f} s", file=sys.stderr, flush=True)
        print("\n".join(failures), end="\n" if failures else "", flush=True)
        bad |= bool(failures)
    return int(bad)


def _remember_families() -> None:
    """Our own data files are no input, so they are read once."""
    from llmc.frontends.hf import config, folder

    config.load_family = functools.cache(config.load_family)
    config.known_families = folder.known_families = functools.cache(config.known_families)


def _limit(room: int) -> None:
    """Memory beyond what is mapped now and what libraries map as they are loaded makes MemoryError."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
