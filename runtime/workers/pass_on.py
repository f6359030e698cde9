"""What mpirun and its workers write, passed on as it comes, less what mpirun adds about an end that is told anyway."""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Callable
from typing import IO

_PIECE_BYTES = 1 << 16

# How mpirun begins to tell of an end, or MPICH's of its own troubles then: on any stream, and the last it says there.
_ENDINGS = (
    b"=" * 83 + b"\n=   BAD TERMINATION", b"[proxy:", b"[mpiexec@", b"-" * 74 + b"\nprterun ", b"-" * 74 + b"\nmpirun ",
)  # fmt: skip
_MOST_WITHHELD = 1 << 14


class Cut:
    """Passes bytes on until one of the endings begins. What could be the beginning of one waits for the next bytes."""

    def __init__(self, endings: tuple[bytes, ...] = _ENDINGS) -> None:
        self._endings = endings
        self._held = self.withheld = b""
        self._over = False

    def of(self, data: bytes) -> bytes:
        r"""What is to be passed on, now that these bytes have come.

        >>> cut = Cut((b"==\nBAD",))
        >>> cut.of(b"a==b="), cut.of(b"=\n"), cut.of(b"BAD luck"), cut.of(b"more")
        (b'a==b', b'', b'', b'')
        """
        if self._over:
            self.withheld = (self.withheld + data)[:_MOST_WITHHELD]
            return b""
        data = self._held + data
        found = [place for place in (data.find(ending) for ending in self._endings) if place >= 0]
        if found:
            self._over, self._held, self.withheld = True, b"", data[min(found) :]
            return data[: min(found)].removesuffix(b"\n")
        keep = max((_common(data, ending) for ending in self._endings), default=0)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """What still waits when nothing more comes."""
        held, self._held = self._held, b""
        return held


def _common(data: bytes, ending: bytes) -> int:
    """How many of the last bytes the ending begins with."""
    most = min(len(data), len(ending) - 1)
    return next((n for n in range(most, 0, -1) if data.endswith(ending[:n])), 0)


class PassOn:
    """Writes what a pipe gives to a file descriptor. `shown`, if any, is applied to text on its way to a terminal."""

    def __init__(self, pipe: IO[bytes], to: int, shown: Callable[[str], str] | None) -> None:
        self._pipe, self._to, self._shown = pipe, to, shown
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._cut = Cut()

    def fileno(self) -> int:
        """Of the pipe."""
        return self._pipe.fileno()

    def more(self) -> bool:
        """Pass on what there is; False at the end of the pipe. Raises OSError when nobody reads it."""
        data = os.read(self._pipe.fileno(), _PIECE_BYTES)
        self._write(self._cut.of(data) if data else self._cut.rest(), last=not data)
        return bool(data)

    @property
    def withheld(self) -> bytes:
        """What mpirun said that was not passed on, but for what is much too long."""
        return self._cut.withheld

    def _write(self, data: bytes, last: bool) -> None:
        if self._shown is not None:
            data = self._shown(self._text.decode(data, last)).encode(errors="replace")
        while data:
            data = data[os.write(self._to, data) :]


def feed(pipe: IO[bytes]) -> None:
    """Give a pipe what comes from standard input, a terminal, which mpirun in its own session cannot read."""

    def copy() -> None:
        try:
            with pipe:
                while data := os.read(0, _PIECE_BYTES):
                    pipe.write(data)
                    pipe.flush()
        except (OSError, ValueError):
            pass  # nobody reads any more

    threading.Thread(target=copy, name="llmc-stdin", daemon=True).start()
