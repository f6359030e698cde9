"""The collectives of a stage whose devices are all GPUs: by NCCL on their streams, with nothing waiting on the host.

What is exchanged are rows as they are filled up (padding.py), which is the same for all of them. Sums are made as
workers/collectives.py makes them, for each number in order of ranks: each sends its part, and a kernel of the artifact
adds. NCCL's own sums may follow the place in the buffer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.runtime.cuda.cudart import ON_DEVICE, Pointer
from llmc.runtime.cuda.device import Device
from llmc.runtime.cuda.dlpack import DeviceMemory
from llmc.runtime.cuda.nccl import ID_BYTES, Communicator, Nccl, Piece, find_nccl
from llmc.runtime.loading.library import import_ffi

if TYPE_CHECKING:
    from llmc.runtime.workers.collectives import Collectives

ADD_PARTS = "add_parts"  # a kernel of the artifact (targets/cuda/elementwise.py): parts (N, M), their sum (M,)
_SLICED_BYTES = 1 << 18  # from here on more than two devices add a slice each, and exchange the sums
_ALIGN = 16  # floats: where kernels may begin to read
_ITEM = 4  # bytes of a float32
_F32 = np.dtype(np.float32)


class DeviceCollectives:
    """`all_reduce` and `all_gather` of the stage of `host`, whose other exchanges stay what they are."""

    _device: Device
    _add_parts: Callable[[Any, Any], Any]

    def __init__(self, communicator: Communicator, host: Collectives) -> None:
        self._communicator, self._host = communicator, host
        self._rank, self._size = host.rank, host.size
        self._others = [rank for rank in range(host.size) if rank != host.rank]
        self._rooms: list[Any] = []  # the last one is the greatest; captured steps know others
        self._name, self._calls = "", itertools.count()
        self._widths: dict[tuple[str, int], list[int]] = {}

    def register(self) -> None:
        """Be what modules of this process call, in place of `host`; to be done before one is loaded."""
        ffi = import_ffi()
        for name in ("all_reduce", "all_gather"):
            ffi.register_global_func(f"llmc.{name}", getattr(self, name), override=True)

    def begin(self, device: Device, add_parts: Callable[[Any, Any], Any]) -> None:
        """Exchange what this device has. Whoever waits for it learns of workers that have ended."""
        self._device, self._add_parts = device, add_parts
        device.waits = self._communicator.watched(self._host.wait)

    def within(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the module, whose collectives come in the same order each time."""
        self._name, self._calls = name, itertools.count()
        return function(*arguments)

    def all_reduce(self, x: Any, group: int, out: Any) -> None:
        """The sum over the stage: x (M, C) -> (M, C)."""
        count, own, total = int(np.prod(x.shape, dtype=np.int64)), x.data_ptr(), out.data_ptr()
        each, rest = divmod(count, self._size)
        if self._size > 2 and count * _ITEM >= _SLICED_BYTES and not rest and each % _ALIGN == 0:
            slices = [_ITEM * each * rank for rank in range(self._size)]
            room = self._room(count)
            self._exchange([own + first for first in slices], [room + first for first in slices], each)
            self._add(room, each, total + slices[self._rank])
            self._exchange([total + slices[self._rank]] * self._size, [total + first for first in slices], each)
        else:
            room = self._room(count * self._size)
            self._exchange([own] * self._size, [room + _ITEM * count * rank for rank in range(self._size)], count)
            self._add(room, count, total)

    def all_gather(self, x: Any, group: int, width: int, out: Any) -> None:
        """Columns side by side: x (M, its columns) -> (M, width)."""
        rows, columns = map(int, x.shape)
        widths = self._widths_of(columns, width)
        firsts = [0, *itertools.accumulate(widths)]
        room = self._room(rows * width)
        parts = [Piece(room + _ITEM * rows * first, _ITEM * rows * w) for first, w in zip(firsts, widths, strict=False)]
        parts[self._rank] = own = Piece(x.data_ptr(), _ITEM * rows * columns)
        device = self._device
        self._communicator.exchange(
            [(rank, own) for rank in self._others], [(rank, parts[rank]) for rank in self._others], device.stream
        )
        for part, first, w in zip(parts, firsts, widths, strict=False):
            at, pitch = out.data_ptr() + _ITEM * first, _ITEM * width
            device.cudart.copy_columns(at, pitch, part.at, _ITEM * w, _ITEM * w, rows, device.stream)

    def _exchange(self, to: list[Pointer], into: list[Pointer], count: int) -> None:
        """Send each rank so many floats, and receive as many from each; one's own are copied."""
        device, nbytes, own = self._device, _ITEM * count, self._rank
        if into[own] != to[own]:
            device.cudart.copy(into[own], to[own], nbytes, ON_DEVICE, device.stream)
        self._communicator.exchange(
            [(rank, Piece(to[rank], nbytes)) for rank in self._others],
            [(rank, Piece(into[rank], nbytes)) for rank in self._others],
            device.stream,
        )

    def _add(self, parts: Pointer, count: int, total: Pointer) -> None:
        """The sum of as many parts as there are ranks."""
        from_dlpack = self._device.ffi.from_dlpack
        memory = [DeviceMemory(parts, (self._size, count), _F32), DeviceMemory(total, (count,), _F32)]
        self._add_parts(*map(from_dlpack, memory))

    def _room(self, count: int) -> Pointer:
        """Memory for so many floats, the same at each call: what is on the stream is done in order."""
        if not self._rooms or int(self._rooms[-1].shape[0]) < count:
            size = 1 << (count - 1).bit_length()
            self._rooms.append(self._device.tensor((size,), _F32, "what devices exchange"))
        return int(self._rooms[-1].data_ptr())

    def _widths_of(self, columns: int, width: int) -> list[int]:
        """How many columns each rank gives in this call, which all ask when they come to it for the first time."""
        key = self._name, next(self._calls)
        if key not in self._widths:
            found = [int(each[0]) for each in self._host.of_all(np.array([columns], np.int64))]
            if sum(found) != width:
                raise RuntimeError(f"all_gather: {sum(found)} columns of the devices together, wanted {width}")
            self._widths[key] = found
        return self._widths[key]


def by_nccl(host: Collectives) -> DeviceCollectives | None:
    """Of a stage of GPUs alone, where all have the same NCCL; else None. All of the stage call it at once.

    Raises LlmcError with what NCCL says.
    """
    nccl = find_nccl()
    versions = {int(each[0]) for each in host.of_all(np.array([nccl.version if nccl else 0], np.int64))}
    if nccl is None or len(versions) > 1:
        return None
    made = nccl.new_id() if host.rank == 0 else bytes(ID_BYTES)
    made = host.of_all(np.frombuffer(made, np.uint8))[0].tobytes()
    return DeviceCollectives(_joined(nccl, made, host), host)


def _joined(nccl: Nccl, made: bytes, host: Collectives) -> Communicator:
    """NCCL waits for all, for ever where one has ended: so another thread does, and this one is told of that."""
    found: list[Communicator | BaseException] = []

    def join() -> None:
        try:
            found.append(nccl.communicator(made, host.size, host.rank))
        except BaseException as error:
            found.append(error)

    threading.Thread(target=join, name="llmc-nccl", daemon=True).start()
    host.wait(lambda: bool(found))
    (communicator,) = found
    if isinstance(communicator, BaseException):
        raise communicator
    return communicator
