"""A compiled step on a device: of index arrays that are filled up, and captured where the same sizes come again.

A step of few rows takes less time on the device than it takes to put its kernels on the stream one by one. So what such
a step puts there is noted down the second time that its sizes come, results' copies included, and then launched as a
whole. It may be followed by another one before anybody knows what it gave (`follow`): the device takes the greatest
token of each row by itself. So there are two sides, each with memory for what goes to the device and comes back.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cuda.cudart import TO_DEVICE, TO_HOST, free_with
from llmc.runtime.cuda.device import Device, Pinned
from llmc.runtime.cuda.dlpack import DeviceMemory
from llmc.runtime.cuda.launched import Captured, Launched, Side
from llmc.runtime.cuda.padding import I32, Sizes, fill, sizes_of
from llmc.runtime.cuda.rows import DeviceRows, Lent
from llmc.runtime.cuda.staging import StagedMemory
from llmc.runtime.errors import LlmcError

_CAPTURED_ROWS = 64  # of a step that is captured, at most: one of more rows keeps the device busy for long enough
_MOST_CAPTURED = 64  # sets of sizes
_INDEX_BYTES = 4 << 20  # of the index arrays of a step that is captured, at most
_RESULT_BYTES = 16 << 20  # of results that are under way at once, unless a captured step has more
_TOLD = 4  # results of a step that gives logits, and beside them all that most strategies want to know
_TOP_IDS = 1  # which of these are the greatest tokens of each row, the greatest first

I32_TYPE = np.dtype(np.int32)
Waits = Callable[[], list[Any]]  # gives the results of a step when it has ended


class DeviceStep:
    """Index arrays of the host -> results, arrays of the host; logits beside their greatest stay on the device.

    function: of index arrays, and then `bound`, tensors of the device. groups: of layers, with a list of pages each.
    spare: the first of the pages that stand for nobody. most: results that are looked at. staging: by which workers
    exchange tensors in the midst of the step, which then is run as it is each time. agree: whether all who exchange
    otherwise have captured a step, when one has, or has not.
    """

    def __init__(
        self, device: Device, function: Callable[..., Any], bound: tuple[Any, ...], groups: int, spare: int, most: int,
        staging: StagedMemory | None = None, agree: Callable[[bool], bool] | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._function = function
        self._bound = bound
        self._groups = groups
        self._spare = spare
        self._most = most
        self._staging = staging
        self._agree = agree
        self._item = device.ffi.get_global_func("ffi.ArrayGetItem")
        self._index_tensor = device.tensor((_INDEX_BYTES // 4,), I32_TYPE, "the index arrays")
        self._sides = [Side(device, _INDEX_BYTES, _RESULT_BYTES)]
        self._seen: dict[Sizes, int] = {}
        self._failed: set[Sizes] = set()  # of steps to follow others, which were not to be captured
        self._views: dict[Sizes, _Cut] = {}

    def __call__(self, *arrays: I32) -> list[Any]:
        """The results of one step, of as many rows as were wanted."""
        return self.begin(*arrays)()

    def begin(self, *arrays: I32) -> Waits:
        """The same, but for waiting until the step has ended."""
        sizes = self._sizes(arrays)
        nbytes, wanted = 4 * sizes.places[-1], len(arrays[6 + self._groups])
        with self._device.lock:
            if self._staging is not None:
                self._staging.rows = {sizes.rows: len(arrays[0]), sizes.wanted: wanted}
            if nbytes > _INDEX_BYTES:
                found = self._run_large(sizes, list(arrays), wanted)
                return lambda: found
            side = self._sides[0]
            self._fill(side, sizes, arrays)
            captured = side.captured.get(sizes) or self._capture(side, sizes, lambda: self._put_index(side, sizes))
            self._put_index(side, sizes)
            if captured is None:
                found = self._read(self._call(self._view(sizes)), wanted)
                return lambda: found
            return self._launch(side, captured, len(arrays[0]), wanted).wait

    def follow(self, *arrays: I32) -> Waits | None:
        """Begin the step behind the one that was begun last, of the same rows, whose tokens are the greatest of these.

        None where that is not to be had: then nothing has begun. What is said of tokens in the arrays does not count.
        """
        sizes, rows, wanted = self._sizes(arrays), len(arrays[0]), len(arrays[6 + self._groups])
        device = self._device
        with device.lock:
            last = None if device.last is None else device.last()
            if last is None or last.step is not self or len(last.captured.tensors) != _TOLD:
                return None
            if not last.rows == last.wanted == rows == wanted or 4 * sizes.places[-1] > _INDEX_BYTES:
                return None
            if len(self._sides) == 1:
                self._sides.append(Side(device, _INDEX_BYTES, _RESULT_BYTES))
            side = self._sides[last.side is self._sides[0]]
            if sizes not in side.captured and (sizes not in self._sides[0].captured or sizes in self._failed):
                return None  # not before it has come twice by itself
            self._fill(side, sizes, arrays)
            ids = last.captured.tensors[_TOP_IDS]

            def put() -> None:
                self._put_index(side, sizes)
                device.cudart.copy_columns(
                    self._index_tensor.data_ptr(), 4, ids.data_ptr(), 4 * int(ids.shape[1]), 4, rows, device.stream
                )

            captured = side.captured.get(sizes) or self._capture(side, sizes, put)
            if captured is None:
                self._failed.add(sizes)
                return None
            put()
            return self._launch(side, captured, rows, wanted).wait

    def _sizes(self, arrays: tuple[I32, ...]) -> Sizes:
        return sizes_of(list(arrays), self._groups, apart=self._staging is not None)

    def _fill(self, side: Side, sizes: Sizes, arrays: tuple[I32, ...]) -> None:
        """Write the arrays to the side's memory, once what was launched from there has ended."""
        side.settle()
        fill(side.index.array[: 4 * sizes.places[-1]].view(np.int32), list(arrays), sizes, self._spare)

    def _launch(self, side: Side, captured: Captured, rows: int, wanted: int) -> Launched:
        self._device.settle()
        launched = Launched(self, side, captured, rows, wanted)
        self._device.cudart.launch(captured.graph, self._device.stream)
        side.begin(launched)
        self._device.last = weakref.ref(launched)
        return launched

    def _parted(self, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        """Results that stay on the device, and those that are copied at once: logits stay where all is told of them."""
        count = int(len(tensors) == _TOLD)
        return tensors[:count], tensors[count:]

    def _put_index(self, side: Side, sizes: Sizes) -> None:
        """Put the copy of the index arrays on the stream."""
        device = self._device
        device.cudart.copy(
            self._index_tensor.data_ptr(), side.index.pointer, 4 * sizes.places[-1], TO_DEVICE, device.stream
        )

    def _view(self, sizes: Sizes) -> list[Any]:
        """The index arrays as tensors of the device."""
        if sizes not in self._views:
            if len(self._views) >= _MOST_CAPTURED:
                self._views.clear()
            self._views[sizes] = _Cut(self._device, self._index_tensor, sizes)
        return self._views[sizes].tensors

    def _call(self, index: list[Any]) -> list[Any]:
        """Put the step on the stream; its results, tensors of the device."""
        self._device.last = None
        with self._device.ffi.use_raw_stream(self._device.handle, self._device.stream):
            found = self._function(*index, *self._bound)
        return [self._item(found, number) for number in range(min(len(found), self._most))]

    def _run_large(self, sizes: Sizes, arrays: list[I32], wanted: int) -> list[Any]:
        """A step with more pages than are listed beforehand."""
        index = np.empty(sizes.places[-1], np.int32)
        fill(index, arrays, sizes, self._spare)
        tensor = self._device.tensor(index.shape, index.dtype, "the index arrays")
        self._device.cudart.copy(tensor.data_ptr(), index.ctypes.data, index.nbytes, TO_DEVICE, self._device.stream)
        cut = _Cut(self._device, tensor, sizes)  # whose memory tensors are views of
        self._sides[0].settle()
        return self._read(self._call(cut.tensors), wanted)

    def _capture(self, side: Side, sizes: Sizes, put: Callable[[], None]) -> Captured | None:
        """Note a step down whose sizes come again, for a side; None where it is to be run as it is.

        In a capture no memory can be had from the device, and TVM keeps what a step gave until the next one has ended.
        So it is run twice first, with what `put` puts on the stream in front of it, which writes the same again, and
        leaves memory of all the sizes that it takes.
        """
        if self._staging is not None or sizes.rows > _CAPTURED_ROWS or len(side.captured) >= _MOST_CAPTURED:
            return None
        if side is self._sides[0]:
            self._seen[sizes] = self._seen.get(sizes, 0) + 1
            if self._seen[sizes] != 2:  # the first time, and where a capture has failed
                return None
        device, last = self._device, self._device.last
        device.settle()
        for _ in range(2):
            put()
            self._call(self._view(sizes))
        device.wait()
        captured = self._noted_down(side, sizes)
        if self._agree is not None and not self._agree(captured is not None):
            return None
        if captured is not None:
            side.captured[sizes] = captured
        device.last = last
        return captured

    def _noted_down(self, side: Side, sizes: Sizes) -> Captured | None:
        """The step; None where the device does not do it."""
        device, view = self._device, self._view(sizes)
        device.cudart.begin_capture(device.stream)
        try:
            tensors = self._call(view)
            lazy, copied = self._parted(tensors)
            places = [0, *itertools.accumulate(_nbytes(tensor) for tensor in copied)]
            results = side.results_of(places.pop())
            for place, tensor in zip(places, copied, strict=True):
                pointer = results.pointer + place
                device.cudart.copy(pointer, tensor.data_ptr(), _nbytes(tensor), TO_HOST, device.stream)
            graph = device.cudart.end_capture(device.stream)
        except (LlmcError, RuntimeError):  # TVM's are RuntimeErrors; run as it is, it fails again if it is at fault
            device.cudart.abandon_capture(device.stream)
            return None
        arrays = [_array(results, place, tensor) for place, tensor in zip(places, copied, strict=True)]
        captured = Captured(graph, tensors, lazy, results, arrays)
        free_with(captured, device.cudart.free_graph, graph)
        return captured

    def _read(self, tensors: list[Any], wanted: int) -> list[Any]:
        """The first `wanted` rows of results, through pinned memory."""
        device, memory = self._device, self._sides[0].results
        lazy, copied = self._parted(tensors)
        found: list[Any] = [DeviceRows(Lent(device, tensor, wanted), 0, wanted) for tensor in lazy]
        if not copied:
            device.wait()  # the index arrays' memory is wanted for the next step
        for tensor in copied:
            array = np.empty((wanted, *tensor.shape[1:]), str(tensor.dtype))
            flat = array.reshape(-1).view(np.uint8)
            for first in range(0, flat.nbytes, memory.array.nbytes):
                part = flat[first : first + memory.array.nbytes]
                device.cudart.copy(memory.pointer, tensor.data_ptr() + first, part.nbytes, TO_HOST, device.stream)
                device.wait()
                part[:] = memory.array[: part.nbytes]
            found.append(array)
        return found


class _Cut:
    """Index arrays that lie one after another in a tensor, as tensors of their own."""

    def __init__(self, device: Device, tensor: Any, sizes: Sizes) -> None:
        first = int(tensor.data_ptr())
        places = zip(sizes.places, sizes.shapes, strict=False)
        self._memory = [DeviceMemory(first + 4 * place, shape, I32_TYPE) for place, shape in places]
        self.tensors = [device.ffi.from_dlpack(memory) for memory in self._memory]


def _nbytes(tensor: Any) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(str(tensor.dtype)).itemsize


def _array(memory: Pinned, place: int, tensor: Any) -> NDArray[Any]:
    shape, dtype = tuple(tensor.shape), np.dtype(str(tensor.dtype))
    return memory.array[place : place + _nbytes(tensor)].view(dtype).reshape(shape)
