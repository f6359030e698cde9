"""NCCL by ctypes: what devices of several processes send each other on their streams, without the host.

Names and numbers: nccl.h of NCCL 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.runtime.cuda.cudart import Pointer
from llmc.runtime.errors import LlmcError
from llmc.runtime.loading import cuda

ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_BYTE = 1  # ncclUint8
_IN_PROGRESS = 7  # ncclInProgress
_LEAST = 2_10_00  # of version numbers: what is called here, and may be captured


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@dataclass(frozen=True)
class Piece:
    """Bytes of the device."""

    at: Pointer
    nbytes: int


class Nccl:
    """The library. Raises LlmcError with what NCCL says."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value

    def new_id(self) -> bytes:
        """What the processes of a communicator are told, made by one of them."""
        made = _Id()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def communicator(self, made: bytes, size: int, rank: int) -> Communicator:
        """Of this process's device with those of the others, who all call it at once: it waits for them."""
        handle = ctypes.c_void_p()
        self.call(
            "ncclCommInitRank", ctypes.byref(handle), ctypes.c_int(size), _Id.from_buffer_copy(made), ctypes.c_int(rank)
        )
        return Communicator(self, handle)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library."""
        status = getattr(self._library, name)(*arguments)
        if status not in (0, _IN_PROGRESS):
            raise LlmcError(
                f"{name}: {self.said(status)} ({cuda.NCCL_WISH}=0 does without NCCL; NCCL_DEBUG=INFO tells more)"
            )

    def said(self, status: int) -> str:
        """What an error is."""
        return f"{self._library.ncclGetErrorString(status).decode(errors='replace')} (error {status})"


class Communicator:
    """This process's part of those that exchange. It is kept until the process ends: captured steps use it."""

    def __init__(self, nccl: Nccl, handle: ctypes.c_void_p) -> None:
        self._nccl, self._handle, self._aborted = nccl, handle, False

    def exchange(self, to: Sequence[tuple[int, Piece]], into: Sequence[tuple[int, Piece]], stream: Pointer) -> None:
        """Have pieces of the device sent to ranks, and others received from ranks, all at once, on the stream."""
        self._check_whole()
        call, comm, on = self._nccl.call, self._handle, ctypes.c_void_p(stream)
        call("ncclGroupStart")
        for name, pieces in (("ncclSend", to), ("ncclRecv", into)):
            for rank, piece in pieces:
                call(
                    name, ctypes.c_void_p(piece.at), ctypes.c_size_t(piece.nbytes), ctypes.c_int(_BYTE),
                    ctypes.c_int(rank), comm, on,
                )  # fmt: skip
        call("ncclGroupEnd")

    def check(self) -> None:
        """Raise LlmcError when something that was put on the stream has failed."""
        self._check_whole()
        status = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(status))
        if status.value not in (0, _IN_PROGRESS):
            raise LlmcError(f"NCCL: {self._nccl.said(status.value)}; start all workers again")

    def abort(self) -> None:
        """End what waits on the stream for others, which would keep this process from ending."""
        if not self._aborted:
            self._aborted = True  # NCCL frees it
            self._nccl.call("ncclCommAbort", self._handle)

    def _check_whole(self) -> None:
        if self._aborted:
            raise LlmcError("exchanges of GPUs were ended; start all workers again")

    def watched(self, wait: Callable[[Callable[[], bool]], None]) -> Callable[[Callable[[], bool]], None]:
        """`wait`, for something on the stream; where it, or NCCL, fails, nothing waits on the stream any more."""

        def checked(done: Callable[[], bool]) -> None:
            def over() -> bool:
                self.check()
                return done()

            try:
                wait(over)
            except BaseException:
                self.abort()
                raise

        return checked


def find_nccl() -> Nccl | None:
    """NCCL, unless this machine has none, or one that is too old, or the user wants none."""
    library = cuda.nccl()
    found = None if library is None else Nccl(library)
    return found if found is not None and found.version >= _LEAST else None
