"""One CUDA device of a process: its stream, tensors in its memory, and copies in the order of the stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cuda.cudart import TO_DEVICE, TO_HOST, Cudart, OutOfMemory, Pointer, free_with
from llmc.runtime.loading import library
from llmc.runtime.loading.integrity import Progress

if TYPE_CHECKING:
    from llmc.runtime.cuda.launched import Launched
    from llmc.runtime.cuda.rows import Lent


_CHUNK_BYTES = 32 << 20  # of weights that are under way at once; two of them are pinned


class Pinned:
    """Host memory that the device copies from and to by itself; `array` (nbytes,) uint8 lies over it."""

    def __init__(self, cudart: Cudart, nbytes: int) -> None:
        self.pointer = cudart.pinned(nbytes)
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pointer))
        free_with(self, cudart.free_pinned, self.pointer)


class Device:
    """The first CUDA device. Copies and calls are done in the order in which they are asked for, on `stream`.

    TVM gives memory of a step to others as soon as the step has been put on the stream. So all models of a process have
    one stream (`the_device`), and who puts more than one thing on it holds `lock`. lent: results of steps that are read
    when somebody wants them. last: the captured step that was launched last, if somebody still wants what it gives;
    None if others have used TVM's memory since. waits: how to wait where what is on the stream may never be done, as it
    waits for others.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.lent: WeakSet[Lent] = WeakSet()
        self.last: ref[Launched] | None = None
        self.waits: Callable[[Callable[[], bool]], None] | None = None
        self.ffi = library.import_ffi()
        self.cudart = Cudart()
        self.stream: Pointer = self.cudart.stream()
        self.handle = self.ffi.device("cuda", 0)
        self._allocate = self.ffi.get_global_func("runtime.TVMTensorAllocWithScope")

    def tensor(self, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> Any:
        """A tensor in the device's memory, of whatever was there. Raises OutOfMemory saying `what` it was for."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        try:
            return self._allocate(self.ffi.Shape(shape), self.ffi.dtype(dtype.name), self.handle, None)
        except Exception as error:  # TVM's own kinds of error
            free = self.cudart.free_bytes()
            if free < nbytes or "memory" in str(error):
                raise OutOfMemory(
                    f"the device has no room for {what}: {nbytes / 1e6:.0f} MB wanted, {free / 1e6:.0f} MB free"
                ) from error
            raise

    def upload(self, arrays: list[NDArray[Any]], progress: Progress | None) -> list[Any]:
        """Arrays as tensors of the device, in chunks through pinned memory while the file's next part is read.

        progress("upload", done, total) is called with bytes.
        """
        tensors = [self.tensor(array.shape, array.dtype, "the weights") for array in arrays]
        total, done, number = sum(array.nbytes for array in arrays), 0, 0
        chunk = max(1, min(_CHUNK_BYTES, total))
        buffers = [Pinned(self.cudart, chunk) for _ in range(2)]
        for array, tensor in zip(arrays, tensors, strict=True):
            flat = array.reshape(-1).view(np.uint8)
            for first in range(0, flat.nbytes, chunk):
                part, buffer = flat[first : first + chunk], buffers[number % 2]
                buffer.array[: part.nbytes] = part
                if number:  # the copy before, which was under way while this part was read, has ended
                    self.wait()
                self.cudart.copy(tensor.data_ptr() + first, buffer.pointer, part.nbytes, TO_DEVICE, self.stream)
                done, number = done + part.nbytes, number + 1
                if progress is not None:
                    progress("upload", done, total)
        self.wait()
        return tensors

    def read(self, tensor: Any) -> NDArray[Any]:
        """A tensor as an array of the host."""
        array = np.empty(tuple(tensor.shape), str(tensor.dtype))
        if self.waits is not None:
            self.wait()  # a copy to memory that is not pinned waits too, and is told nothing meanwhile
        if array.nbytes:
            self.cudart.copy(array.ctypes.data, tensor.data_ptr(), array.nbytes, TO_HOST, self.stream)
        self.wait()
        return array

    def settle(self) -> None:
        """Read what is lent, while it is what it was."""
        for lent in list(self.lent):
            lent.settle()
        self.lent.clear()

    def wait(self) -> None:
        """Wait until all that was asked for is done."""
        if self.waits is None:
            self.cudart.wait(self.stream)
        else:
            self.waits(partial(self.cudart.done, self.stream))

    def wait_for(self, event: Pointer) -> None:
        """Wait until all that was asked for before the event was recorded is done."""
        if self.waits is None:
            self.cudart.wait_event(event)
        else:
            self.waits(partial(self.cudart.event_done, event))


@cache
def the_device() -> Device:
    """The one of this process."""
    return Device()
