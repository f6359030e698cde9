"""Pages of a layer in the device's memory, indexed as PagePool's arrays are.

`pages[new] = pages[old]` is one copy on the device, and nobody waits for it. `pages[places]` of an array of places is
an array of the host's, and `pages[places] = array` writes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cuda.cudart import ON_DEVICE, TO_DEVICE, TO_HOST
from llmc.runtime.cuda.device import Device


@dataclass(frozen=True)
class Page:
    """One page, still on the device: what may be assigned to another one."""

    pointer: int
    nbytes: int


class DevicePages:
    """`shape` (pages, *page_shape); `spare` more pages lie behind them, for rows that stand for nobody."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any], spare: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.tensor = device.tensor((shape[0] + spare, *shape[1:]), dtype, "the KV cache; load with fewer cache_tokens")
        self._device = device
        self._page_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all pages but the spare ones."""
        return self.shape[0] * self._page_bytes

    def __getitem__(self, places: int | NDArray[np.integer[Any]]) -> Any:
        if isinstance(places, (int, np.integer)):
            return Page(self._pointer(int(places)), self._page_bytes)
        found = np.empty((len(places), *self.shape[1:]), self.dtype)
        for place, page in zip(places.tolist(), found, strict=True):
            self._copy(page.ctypes.data, self._pointer(place), TO_HOST)
        self._device.wait()
        return found

    def __setitem__(self, places: int | NDArray[np.integer[Any]], values: Page | NDArray[Any]) -> None:
        if isinstance(values, Page):
            assert isinstance(places, (int, np.integer)), "a page is assigned to one place"
            self._copy(self._pointer(int(places)), values.pointer, ON_DEVICE)
            return
        assert not isinstance(places, (int, np.integer))
        values = np.ascontiguousarray(values, self.dtype)
        for place, page in zip(places.tolist(), values, strict=True):
            self._copy(self._pointer(place), page.ctypes.data, TO_DEVICE)
        self._device.wait()

    def _pointer(self, place: int) -> int:
        if not 0 <= place < self.shape[0]:
            raise IndexError(f"page {place} of {self.shape[0]}")
        return int(self.tensor.data_ptr()) + place * self._page_bytes

    def _copy(self, to: int, source: int, kind: int) -> None:
        with self._device.lock:
            self._device.cudart.copy(to, source, self._page_bytes, kind, self._device.stream)
