"""What workers exchange of a device's tensors, through the host's memory, of the rows that a step really has."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cuda.cudart import TO_DEVICE
from llmc.runtime.cuda.device import the_device


class StagedMemory:
    """Tensors of the device as `Memory` of workers/collectives.py has them.

    rows: rows of a tensor of the step that is run -> those that the index arrays really had. Others stand for nobody
    (padding.py): other workers have none of them, or others. Here they are zeros.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def given(self, x: Any) -> NDArray[Any]:
        """Waits for all that the step has put on the stream so far."""
        array = the_device().read(x)
        return array[: self._real(x)]

    def room(self, out: Any) -> NDArray[Any]:
        """Of real rows."""
        return np.zeros((self._real(out), *out.shape[1:]), str(out.dtype))

    def put(self, out: Any, array: NDArray[Any]) -> None:
        """Waits until it is there."""
        device, whole = the_device(), np.zeros(tuple(out.shape), str(out.dtype))
        whole[: len(array)] = array
        device.cudart.copy(out.data_ptr(), whole.ctypes.data, whole.nbytes, TO_DEVICE, device.stream)
        device.wait()

    def _real(self, tensor: Any) -> int:
        count = int(tensor.shape[0])
        return self.rows.get(count, count)
