"""Logits that stay on the device until somebody wants them: most steps are asked for their greatest alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cuda.cudart import TO_HOST
from llmc.runtime.cuda.device import Device


class Left:
    """A result of a step (at least `count`, V), where the step left it."""

    def __init__(self, device: Device, tensor: Any, count: int) -> None:
        self.shape = (count, int(tensor.shape[1]))
        self._device, self._tensor = device, tensor
        self._settled: NDArray[np.float32] | None = None

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """Rows from `first` to before `last`."""
        device, width = self._device, self.shape[1]
        with device.lock:
            if self._settled is not None:
                return self._settled[first:last]
            array = np.empty((last - first, width), np.float32)
            if array.size:
                place = self._tensor.data_ptr() + first * width * array.itemsize
                device.cudart.copy(array.ctypes.data, place, array.nbytes, TO_HOST, device.stream)
                device.wait()
            return array

    def settle(self) -> None:
        """Read all of it now: its memory is about to be written."""
        self._settled = self.read(0, self.shape[0])


class DeviceRows:
    """Rows of it from `first` to before `last`, as `Rows` of runner.py."""

    def __init__(self, left: Left, first: int, last: int) -> None:
        self.shape = (last - first, left.shape[1])
        self._left, self._first, self._last = left, first, last

    def __getitem__(self, rows: slice) -> DeviceRows:
        first, last, _ = rows.indices(self.shape[0])
        return DeviceRows(self._left, self._first + first, self._first + max(first, last))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self._left.read(self._first, self._last).astype(dtype or np.float32, copy=False)
