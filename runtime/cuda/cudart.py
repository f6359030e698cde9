"""CUDA's runtime library by ctypes: memory, copies, streams and captured graphs, each call checked.

Names and numbers: cuda_runtime_api.h and driver_types.h of CUDA 13. TVM's own CUDA runtime is linked with the same
library, so memory and streams are common to both.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from llmc.runtime.errors import LlmcError
from llmc.runtime.loading.cuda import cudart_path

TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_READY = 600  # cudaErrorNotReady
_WITHOUT_TIMES = 2  # cudaEventDisableTiming
_THREAD_LOCAL = 1  # cudaStreamCaptureMode: what other threads ask of the device meanwhile does not end a capture

Pointer = int  # an address, of host or device, or a handle


def free_with(owner: object, free: Callable[[Pointer], None], handle: Pointer) -> None:
    """Call `free(handle)` when `owner` is gone; not at the end of the process, when CUDA may have ended before."""
    weakref.finalize(owner, free, handle).atexit = False


class OutOfMemory(LlmcError):
    """The device has not so much memory free."""


class Cudart:
    """The library. Every method raises LlmcError with what CUDA says."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(cudart_path(), ctypes.RTLD_GLOBAL)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def free_bytes(self) -> int:
        """Bytes of the device that are free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def pinned(self, nbytes: int) -> Pointer:
        """Host memory that the device reads and writes by itself."""
        return self._made("cudaMallocHost", ctypes.c_size_t(nbytes))

    def free_pinned(self, memory: Pointer) -> None:
        """Give it back."""
        self._call("cudaFreeHost", ctypes.c_void_p(memory))

    def stream(self) -> Pointer:
        """A new stream."""
        return self._made("cudaStreamCreateWithFlags", ctypes.c_uint(0))

    def copy(self, to: Pointer, source: Pointer, nbytes: int, kind: int, stream: Pointer) -> None:
        """Have bytes copied on the stream; to or from host memory that is not pinned, before this returns."""
        self._call(
            "cudaMemcpyAsync", ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes),
            ctypes.c_int(kind), ctypes.c_void_p(stream),
        )  # fmt: skip

    def copy_columns(
        self, to: Pointer, to_pitch: int, source: Pointer, pitch: int, width: int, rows: int, stream: Pointer
    ) -> None:
        """Have `width` bytes of each of so many rows, `pitch` bytes apart, copied on the stream, within the device."""
        self._call(
            "cudaMemcpy2DAsync", ctypes.c_void_p(to), ctypes.c_size_t(to_pitch), ctypes.c_void_p(source),
            ctypes.c_size_t(pitch), ctypes.c_size_t(width), ctypes.c_size_t(rows), ctypes.c_int(ON_DEVICE),
            ctypes.c_void_p(stream),
        )  # fmt: skip

    def done(self, stream: Pointer) -> bool:
        """Whether all that is on the stream is done."""
        return self._is_done("cudaStreamQuery", stream)

    def _is_done(self, query: str, handle: Pointer) -> bool:
        status: int = getattr(self._library, query)(ctypes.c_void_p(handle))
        if status == _NOT_READY:
            self._library.cudaGetLastError()  # which it is no more than a query's answer
            return False
        self._check(query, status)
        return True

    def event(self) -> Pointer:
        """A mark that can be put on a stream."""
        return self._made("cudaEventCreateWithFlags", ctypes.c_uint(_WITHOUT_TIMES))

    def record(self, event: Pointer, stream: Pointer) -> None:
        """Put it on the stream, behind what is there."""
        self._call("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_event(self, event: Pointer) -> None:
        """Wait until the stream has come to where it was put last."""
        self._call("cudaEventSynchronize", ctypes.c_void_p(event))

    def event_done(self, event: Pointer) -> bool:
        """Whether it has."""
        return self._is_done("cudaEventQuery", event)

    def free_event(self, event: Pointer) -> None:
        """Throw it away."""
        self._call("cudaEventDestroy", ctypes.c_void_p(event))

    def wait(self, stream: Pointer) -> None:
        """Wait until all that is on the stream is done."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def begin_capture(self, stream: Pointer) -> None:
        """From here on what is put on the stream is not run but noted down."""
        self._call("cudaStreamBeginCapture", ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL))

    def end_capture(self, stream: Pointer) -> Pointer:
        """What was noted down, ready to launch."""
        graph = self._made("cudaStreamEndCapture", handle_last=True, of=ctypes.c_void_p(stream))
        try:
            return self._made("cudaGraphInstantiate", ctypes.c_void_p(graph), ctypes.c_ulonglong(0))
        finally:
            self._call("cudaGraphDestroy", ctypes.c_void_p(graph))

    def abandon_capture(self, stream: Pointer) -> None:
        """End a capture that failed; whatever it gives is thrown away."""
        graph = ctypes.c_void_p()
        self._library.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
        if graph.value:
            self._library.cudaGraphDestroy(graph)
        self._library.cudaGetLastError()

    def launch(self, graph: Pointer, stream: Pointer) -> None:
        """Run what was noted down, on the stream."""
        self._call("cudaGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def free_graph(self, graph: Pointer) -> None:
        """Throw it away."""
        self._call("cudaGraphExecDestroy", ctypes.c_void_p(graph))

    def _made(self, name: str, *arguments: Any, handle_last: bool = False, of: Any = None) -> Pointer:
        """What a call gives through its first argument, or its second."""
        made = ctypes.c_void_p()
        given = [of, ctypes.byref(made)] if handle_last else [ctypes.byref(made), *arguments]
        self._call(name, *given)
        return made.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            said = self._library.cudaGetErrorString(status).decode(errors="replace")
            self._library.cudaGetLastError()  # so that TVM's next call does not find it
            kind = OutOfMemory if status == _NO_MEMORY else LlmcError
            raise kind(f"{name}: {said} (error {status})")
