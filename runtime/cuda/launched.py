"""Captured steps that were launched, and from where: memory of the host that the device reads and writes by itself."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llmc.runtime.cuda.cudart import Pointer, free_with
from llmc.runtime.cuda.device import Device, Pinned
from llmc.runtime.cuda.padding import Sizes
from llmc.runtime.cuda.rows import DeviceRows, GoneRows, Lent


@dataclass(frozen=True)
class Captured:
    """A step that was noted down. `tensors`: its results, which must not be given to others. `lazy`: those that stay on
    the device; `copied`: those that come to pinned memory, `results`, as arrays there.
    """

    graph: Pointer
    tensors: list[Any]
    lazy: list[Any]
    results: Pinned
    copied: list[NDArray[Any]]


class Side:
    """Memory for index arrays on their way to the device and for results on their way back, of one step at a time.

    captured: steps that were noted down to be launched from here.
    """

    def __init__(self, device: Device, index_bytes: int, result_bytes: int) -> None:
        self.device = device
        self.index = Pinned(device.cudart, index_bytes)
        self.results = Pinned(device.cudart, result_bytes)
        self.captured: dict[Sizes, Captured] = {}
        self._event = device.cudart.event()
        free_with(self, device.cudart.free_event, self._event)
        self._under_way = False
        self._launched: weakref.ref[Launched] | None = None

    def results_of(self, nbytes: int) -> Pinned:
        """Pinned memory for results; steps captured before keep theirs."""
        if nbytes > self.results.array.nbytes:
            self.results = Pinned(self.device.cudart, nbytes)
        return self.results

    def begin(self, launched: Launched) -> None:
        """It was launched from here: until it has ended, the memory is its."""
        self.device.cudart.record(self._event, self.device.stream)
        self._under_way, self._launched = True, weakref.ref(launched)

    def wait(self) -> None:
        """Wait until what was launched from here has ended."""
        if self._under_way:
            self.device.wait_for(self._event)
            self._under_way = False

    def settle(self) -> None:
        """The memory is to be another step's: whoever launched the last one, and still wants its results, has them."""
        self.wait()
        launched = None if self._launched is None else self._launched()
        self._launched = None
        if launched is not None:
            launched.wait()


class Launched:
    """A captured step that was launched, of so many rows, and as many results `wanted`. step: whose it is."""

    def __init__(self, step: object, side: Side, captured: Captured, rows: int, wanted: int) -> None:
        self.step, self.side, self.captured, self.rows, self.wanted = step, side, captured, rows, wanted
        self._found: list[Any] | None = None

    def wait(self) -> list[Any]:
        """Its results. Logits that stay on the device are there until something else is launched."""
        device, wanted = self.side.device, self.wanted
        with device.lock:
            if self._found is None:
                self.side.wait()
                there = device.last is not None and device.last() is self
                self._found = [
                    *(self._rows(tensor, there) for tensor in self.captured.lazy),
                    *(array[:wanted].copy() for array in self.captured.copied),
                ]
            return self._found

    def _rows(self, tensor: Any, there: bool) -> DeviceRows | GoneRows:
        if not there:
            return GoneRows((self.wanted, int(tensor.shape[1])))
        return DeviceRows(Lent(self.side.device, tensor, self.wanted), 0, self.wanted)
