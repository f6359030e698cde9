"""What GPUs exchange by NCCL, on their streams, with nothing waiting on the host.

Where all devices are GPUs, it is all they exchange; else what those of a stage of GPUs alone have in common. Rows are
exchanged as they are filled up (padding.py), which is the same for all of them. Sums are made as workers/collectives.py
makes them, for each number in order of ranks: each sends its part, and a kernel of the artifact adds. NCCL's own sums
may follow the place in the buffer.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.runtime.cuda.cudart import ON_DEVICE, TO_DEVICE, Pointer
from llmc.runtime.cuda.device import Device
from llmc.runtime.cuda.dlpack import DeviceMemory
from llmc.runtime.cuda.nccl import ID_BYTES, Communicator, Nccl, Piece, find_nccl
from llmc.runtime.loading.library import import_ffi

if TYPE_CHECKING:
    from llmc.runtime.loading.device_manifest import DeviceManifest
    from llmc.runtime.workers.collectives import Collectives, Group

ADD_PARTS = "add_parts"  # a kernel of the artifact (targets/cuda/elementwise.py): parts (N, M), their sum (M,)
_SLICED_BYTES = 1 << 18  # from here on more than two devices add a slice each, and exchange the sums
_ALIGN = 16  # floats: where kernels may begin to read
_ITEM = 4  # bytes of a number
_F32 = np.dtype(np.float32)
_SUMS = -1  # the room of sums and columns; those of what is sent have numbers from 0 on


class DeviceCollectives:
    """The collectives of this worker's module: `all_reduce`, `all_gather` of its stage; among all, the others too.

    group: those that share the communicator, on the host. stage: the ranks of this worker's stage in it.
    """

    _device: Device
    _add_parts: Callable[[Any, Any], Any]
    _zero: Any

    def __init__(self, communicator: Communicator, host: Collectives, group: Group, stage: Sequence[int]) -> None:
        self._communicator, self._group, self._within_stage = communicator, group, host.stage
        self._stage, self._rank, self._size = stage, host.stage.rank, host.stage.size
        self.has_all = group is host.everyone
        # The last of each is the greatest; captured steps know others.
        self._rooms: defaultdict[int, list[Any]] = defaultdict(list)
        self._name, self._calls = "", itertools.count()
        self._widths: dict[tuple[str, int], list[int]] = {}
        self._leaving: list[tuple[int, Piece]] = []

    def register(self) -> None:
        """Be what modules of this process call; to be done before one is loaded."""
        ffi = import_ffi()
        for name in ("all_reduce", "all_gather", *(("send", "recv") if self.has_all else ())):
            ffi.register_global_func(f"llmc.{name}", getattr(self, name), override=True)

    def begin(self, device: Device, add_parts: Callable[[Any, Any], Any] | None) -> None:
        """Exchange what this device has. Whoever waits for it learns of workers that have ended."""
        self._device = device
        if add_parts is not None:
            self._add_parts = add_parts
        self._zero = device.tensor((1,), np.dtype(np.int32), "what devices exchange")
        zero = np.zeros(1, np.int32)
        device.cudart.copy(self._zero.data_ptr(), zero.ctypes.data, zero.nbytes, TO_DEVICE, device.stream)
        device.wait()
        device.waits = self._communicator.watched(self._group.wait)

    def agree(self, captured: bool) -> bool:
        """Whether all have captured a step: what one launches as such, NCCL wants of all."""
        return all(bool(each[0]) for each in self._group.of_all(np.array([captured], np.int64)))

    def within(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the module, whose collectives come in the same order each time.

        What goes to other stages leaves all at once, so that they may take it in any order: when all else is on the
        stream, or with what comes from them, which they may make of it.
        """
        self._name, self._calls, self._leaving = name, itertools.count(), []
        found = function(*arguments)
        if self._leaving:
            self._leave_and_take(())
        return found

    def all_reduce(self, x: Any, group: int, out: Any) -> None:
        """The sum over the stage: x (M, C) -> (M, C)."""
        count, own, total = _count(x), x.data_ptr(), out.data_ptr()
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
        self._to_stage([own] * self._size, parts)
        for part, first, w in zip(parts, firsts, widths, strict=False):
            at, pitch = out.data_ptr() + _ITEM * first, _ITEM * width
            self._device.cudart.copy_columns(at, pitch, part.at, _ITEM * w, _ITEM * w, rows, self._device.stream)

    def send(self, x: Any, to: int, out: Any) -> None:
        """To a rank of another stage, some time later; x may be overwritten before."""
        if to >= 0:
            kept = Piece(self._room(_count(x), len(self._leaving)), _ITEM * _count(x))
            self._copy(kept.at, x.data_ptr(), kept.nbytes)
            self._leaving.append((to, kept))
        self._copy(out.data_ptr(), self._zero.data_ptr(), _ITEM)

    def recv(self, like: Any, source: int, width: int, out: Any) -> None:
        """From a rank of another stage."""
        self._leave_and_take([(source, Piece(out.data_ptr(), _ITEM * _count(out)))])

    def _leave_and_take(self, coming: Sequence[tuple[int, Piece]]) -> None:
        leaving, self._leaving = self._leaving, []
        self._communicator.exchange(leaving, coming, self._device.stream)

    def _exchange(self, to: list[Pointer], into: list[Pointer], count: int) -> None:
        """Send each of the stage so many floats, and receive as many from each; one's own are copied."""
        nbytes, own = _ITEM * count, self._rank
        if into[own] != to[own]:
            self._copy(into[own], to[own], nbytes)
        self._to_stage([Piece(at, nbytes) for at in to], [Piece(at, nbytes) for at in into])

    def _to_stage(self, to: list[Piece], into: list[Piece]) -> None:
        """Send each of the others of the stage its piece, and receive one from each."""
        others = [place for place in range(self._size) if place != self._rank]
        sent, received = ([(self._stage[place], pieces[place]) for place in others] for pieces in (to, into))
        self._communicator.exchange(sent, received, self._device.stream)

    def _copy(self, to: Pointer, source: Pointer, nbytes: int) -> None:
        self._device.cudart.copy(to, source, nbytes, ON_DEVICE, self._device.stream)

    def _add(self, parts: Pointer, count: int, total: Pointer) -> None:
        """The sum of as many parts as there are ranks."""
        from_dlpack = self._device.ffi.from_dlpack
        memory = [DeviceMemory(parts, (self._size, count), _F32), DeviceMemory(total, (count,), _F32)]
        self._add_parts(*map(from_dlpack, memory))

    def _room(self, count: int, which: int = _SUMS) -> Pointer:
        """Memory for so many floats, the same at each call: what is on the stream is done in order."""
        rooms = self._rooms[which]
        if not rooms or _count(rooms[-1]) < count:
            rooms.append(self._device.tensor((1 << (count - 1).bit_length(),), _F32, "what devices exchange"))
        return int(rooms[-1].data_ptr())

    def _widths_of(self, columns: int, width: int) -> list[int]:
        """How many columns each rank gives in this call, which all ask when they come to it for the first time."""
        key = self._name, next(self._calls)
        if key not in self._widths:
            found = [int(each[0]) for each in self._within_stage.of_all(np.array([columns], np.int64))]
            if sum(found) != width:
                raise RuntimeError(f"all_gather: {sum(found)} columns of the devices together, wanted {width}")
            self._widths[key] = found
        return self._widths[key]


def _count(tensor: Any) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64))


def by_nccl(manifest: DeviceManifest, host: Collectives) -> DeviceCollectives | None:
    """Where all of them are GPUs, or those of this worker's stage, and have the same NCCL; else None.

    All of these call it at once. Raises LlmcError with what NCCL says.
    """
    own = manifest.ranks[manifest.rank].stage
    if not (manifest.all_gpus or manifest.shared_by_gpus(own)):
        return None
    group = host.everyone if manifest.all_gpus else host.stage
    communicator = joined(group)
    if communicator is None:
        return None
    stage = manifest.groups[own] if manifest.all_gpus else range(group.size)
    return DeviceCollectives(communicator, host, group, stage)


def joined(group: Group) -> Communicator | None:
    """The communicator of a group, unless one of them has no NCCL, or another one."""
    nccl = find_nccl()
    versions = {int(each[0]) for each in group.of_all(np.array([nccl.version if nccl else 0], np.int64))}
    if nccl is None or len(versions) > 1:
        return None
    made = nccl.new_id() if group.rank == 0 else bytes(ID_BYTES)
    made = group.of_all(np.frombuffer(made, np.uint8))[0].tobytes()
    return _waited_for(nccl, made, group)


def _waited_for(nccl: Nccl, made: bytes, group: Group) -> Communicator:
    """NCCL waits for all, for ever where one has ended: so another thread does, and this one is told of that."""
    found: list[Communicator | BaseException] = []

    def join() -> None:
        try:
            found.append(nccl.communicator(made, group.size, group.rank))
        except BaseException as error:
            found.append(error)

    threading.Thread(target=join, name="llmc-nccl", daemon=True).start()
    group.wait(lambda: bool(found))
    (communicator,) = found
    if isinstance(communicator, BaseException):
        raise communicator
    return communicator
