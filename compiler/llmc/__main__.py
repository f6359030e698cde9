"""`python -m llmc`: the same as the command `llmc`."""

from __future__ import annotations

import contextlib
import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    # A byte the terminal cannot show becomes "?", never an exception in the middle of an answer.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        from llmc.cli import command

        command(prog_name="llmc")
    except KeyboardInterrupt:  # Ctrl-C while the imports above still run
        sys.exit(130)


if __name__ == "__main__":
    main()
