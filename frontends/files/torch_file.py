"""Reads a file of tensors that `torch.save` wrote, without torch: a dict of names, each tensor left where it is.

Both layouts (torch/serialization.py: `_save`, `_legacy_save`):

- zip: NAME/data.pkl is the pickle, NAME/data/KEY the bytes of a storage, NAME/byteorder "little".
- before PyTorch 1.6: five pickles (a magic number, 1001, facts of the machine, the dict, a list of keys), then for each
  key the number of values and the values.

A tensor is a view of a storage, often of one that others share; its strides may be any.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile, open_mapped
from llmc.frontends.files.pickle_file import Storage, View, read_pickle
from llmc.frontends.files.safetensors_file import SIZES
from llmc.frontends.files.stored_zip import MAGIC, stored_files
from llmc.frontends.tensor import Tensor

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001

_Places = dict[str, tuple[int, int]]  # key of a storage -> offset and bytes in the file


@dataclass(frozen=True, kw_only=True)
class StridedTensor(Tensor):
    """A tensor whose values do not lie one after another: `strides`, in values, are those of the file.

    `offset` is where its first value is; `nbytes` counts the values, not what lies between them.
    """

    strides: tuple[int, ...]

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """A copy, rows and values in order."""
        size = SIZES[self.stored]
        shape = self.shape if len(self.shape) > 1 else (1, *self.shape)
        strides = self.strides if len(self.shape) > 1 else (0, *self.strides)
        first = self.offset + start * strides[0] * size
        shape = (stop - start, *shape[1:])
        if 0 in shape:
            return np.empty((shape[0], size * prod(shape[1:])), np.uint8)
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        buffer = self.file.bytes_at(first, span * size)
        values = np.ndarray(shape, f"<u{size}", buffer, 0, tuple(stride * size for stride in strides))
        return np.ascontiguousarray(values).view(np.uint8).reshape(stop - start, -1)


def read_torch(path: Path) -> dict[str, Tensor]:
    """Maps the file: its names -> tensors. Raises SourceError naming what is wrong."""
    file = open_mapped(path, minimum=16)
    value, places = _read_zip(file) if file.data[:4] == MAGIC else _read_legacy(file)
    if not isinstance(value, dict):
        raise SourceError(f"{file.name}: holds {clip(value)}, wanted a dict of names and tensors")
    return {name: _tensor(file, name, entry, places) for name, entry in value.items()}


def _read_zip(file: MappedFile) -> tuple[Any, _Places]:
    files = stored_files(file)
    homes = [name[: -len("/data.pkl")] for name in files if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(homes) != 1:
        raise SourceError(f"{file.name}: an archive with {len(homes)} files data.pkl, wanted what torch.save writes")
    home = homes[0]
    if f"{home}/constants.pkl" in files:
        raise SourceError(
            f"{file.name}: a TorchScript program, which llmc does not run; save the model with save_pretrained"
        )
    if f"{home}/byteorder" in files:
        at, count = files[f"{home}/byteorder"]
        _check_order(file, file.data[at : at + min(count, 16)] == b"little")
    at, count = files[f"{home}/data.pkl"]
    value, end, storages = read_pickle(file, at, at + count)
    if end != at + count:
        raise SourceError(f"{file.name}: data.pkl goes on for {at + count - end} bytes after its end; it is damaged")
    places = {}
    for key, storage in storages.items():
        name = f"{home}/data/{key}"
        if name not in files:
            raise SourceError(f"{file.name}: no file {clip(name)} in the archive; it is damaged, fetch it again")
        places[key] = files[name]
        _check_size(file, storage, files[name][1])
    return value, places


def _read_legacy(file: MappedFile) -> tuple[Any, _Places]:
    at, head = 0, []
    for _ in range(3):
        value, at, _ = read_pickle(file, at, file.size)
        head.append(value)
        if head[0] != LEGACY_MAGIC:
            raise SourceError(f"{file.name}: a pickle of {clip(head[0])}, wanted what torch.save writes")
    _, version, machine = head
    if version != LEGACY_VERSION or not isinstance(machine, dict):
        raise SourceError(f"{file.name}: version {clip(version)} of torch.save's format, wanted {LEGACY_VERSION}")
    _check_order(file, machine.get("little_endian") is True)
    value, at, storages = read_pickle(file, at, file.size)
    keys, at, _ = read_pickle(file, at, file.size)
    listed = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not listed or len(set(keys)) != len(keys) or set(keys) != set(storages):
        raise SourceError(f"{file.name}: lists storages {clip(keys)}, but tensors are in {clip(list(storages))}")
    places = {}
    for key in keys:
        storage = storages[key]
        count = int.from_bytes(file.bytes_at(at, 8), "little")
        if count != storage.count:
            raise SourceError(f"{file.name}: storage {clip(key)} has {count} values, wanted {storage.count}")
        nbytes = count * SIZES[storage.stored]
        file.bytes_at(at + 8, nbytes)  # refuses what is cut short
        places[key] = (at + 8, nbytes)
        at += 8 + nbytes
    if at != file.size:
        raise SourceError(f"{file.name}: {file.size - at} bytes after the last storage, wanted none; it is damaged")
    return value, places


def _check_order(file: MappedFile, little: bool) -> None:
    if not little:
        raise SourceError(
            f"{file.name}: is big-endian, llmc reads little-endian files; save it again on such a machine"
        )


def _check_size(file: MappedFile, storage: Storage, nbytes: int) -> None:
    if nbytes != storage.count * SIZES[storage.stored]:
        raise SourceError(
            f"{file.name}: storage {clip(storage.key)} of {storage.count} {storage.stored} has {nbytes} bytes; "
            "the file is damaged, fetch it again"
        )


def _tensor(file: MappedFile, name: str, view: Any, places: _Places) -> Tensor:
    def fail(problem: str) -> SourceError:
        return SourceError(f"{file.name}: tensor {clip(name)}: {problem}; the file is damaged")

    if not isinstance(view, View):
        raise SourceError(
            f"{file.name}: {clip(name)} is {clip(view)}, wanted a tensor; save the model's state_dict and nothing else"
        )
    start, room = places[view.storage.key]
    size = SIZES[view.stored]
    count = prod(view.shape)
    described = f"shape {clip(list(view.shape))} and strides {clip(list(view.strides))} from {view.offset}"
    last = view.offset + sum((n - 1) * stride for n, stride in zip(view.shape, view.strides, strict=True))
    # Values that overlap would let a short file stand for a huge tensor.
    if count * size > room or (count and (last + 1) * size > room):
        raise fail(f"{described} in a storage of {room} bytes of {view.stored}")
    place = (name, view.shape, view.stored, start + view.offset * size if count else start, count * size, file)
    if not count or view.strides == _one_after_another(view.shape, view.strides):
        return Tensor(*place)
    return StridedTensor(*place, strides=view.strides)


def _one_after_another(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of values that lie in order; those of sizes of 1 do not matter and are left as they are."""
    wanted, step = [], 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        wanted.append(stride if size == 1 else step)
        step *= size
    return tuple(reversed(wanted))
