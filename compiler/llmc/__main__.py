"""`python -m llmc`: the same as the command `llmc`."""

from __future__ import annotations

import contextlib
import gc
import os
import sys

# New containers between two searches for garbage in cycles. A start makes half as many, and next to none in cycles.
_GARBAGE = 100_000


def main() -> None:
    """Run the command line and leave with its exit code."""
    gc.set_threshold(_GARBAGE)
    _open_closed_streams()
    # A byte the terminal cannot show becomes "?", never an exception in the middle of an answer.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with _membership():
            from llmc.cli import command

            command(prog_name="llmc")
    except KeyboardInterrupt:  # Ctrl-C while the imports above still run
        sys.exit(130)
    finally:
        gc.freeze()  # the process ends, and is not searched for garbage once more: that takes as long as ten tokens


def _membership() -> contextlib.AbstractContextManager[None]:
    """That of a worker, where a launcher started this process; nothing is imported for all others."""
    if "LLMC_LAUNCHER" not in os.environ:
        return contextlib.nullcontext()
    from llmc.runtime.workers.member import membership

    return membership()


def _open_closed_streams() -> None:
    """Stand in for streams that the caller closed: Python has None there, and a file would get their number.

    Nothing is then read from standard input, and what goes to standard error is lost; without a standard output there
    is nowhere to answer, which is an error.
    """
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
    closed = sys.stdout is None
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if closed:
        sys.exit("llmc: standard output is closed, so there is nowhere to answer; redirect it to a file or /dev/null")


if __name__ == "__main__":
    main()
