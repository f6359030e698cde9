"""Logits that stay on the device until somebody wants them: most steps are asked for their greatest alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cuda.cudart import TO_HOST
from llmc.runtime.cuda.device import Device
from llmc.runtime.errors import LlmcError


class Lent:
    """A result of a step (at least `count`, V), where the step left it.

    Memory that TVM takes for a step is that of others afterwards, and a captured step writes to where it was captured,
    whoever has it now. So all that is lent is read before a captured step is launched (`Device.settle`).
    """

    def __init__(self, device: Device, tensor: Any, count: int) -> None:
        self.shape = (count, int(tensor.shape[1]))
        self._device, self._tensor = device, tensor
        self._settled: NDArray[np.float32] | None = None
        device.lent.add(self)

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
        """Read all of it now, and give its memory back."""
        if self._settled is None:
            self._settled, self._tensor = self.read(0, self.shape[0]), None


class DeviceRows:
    """Rows of it from `first` to before `last`, as `Rows` of runner.py."""

    def __init__(self, lent: Lent, first: int, last: int) -> None:
        self.shape = (last - first, lent.shape[1])
        self._lent, self._first, self._last = lent, first, last

    def __getitem__(self, rows: slice) -> DeviceRows:
        first, last, _ = rows.indices(self.shape[0])
        return DeviceRows(self._lent, self._first + first, self._first + max(first, last))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self._lent.read(self._first, self._last).astype(dtype or np.float32, copy=False)


class GoneRows:
    """Logits of a step that another one followed before anybody wanted them, as `Rows` of runner.py."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape

    def __getitem__(self, rows: slice) -> GoneRows:
        return GoneRows((len(range(*rows.indices(self.shape[0]))), self.shape[1]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        raise LlmcError("logits of a step that was followed are not there any more; its greatest are")
