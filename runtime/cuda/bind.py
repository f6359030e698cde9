"""The compiled functions of an artifact for CUDA as a Runner calls them, with the cache and weights on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.cuda.cudart import TO_DEVICE
from llmc.runtime.cuda.device import Device, the_device
from llmc.runtime.cuda.padding import SPARE_PAGES
from llmc.runtime.cuda.pages import DevicePages
from llmc.runtime.cuda.staging import StagedMemory
from llmc.runtime.cuda.steps import DeviceStep
from llmc.runtime.loading import library
from llmc.runtime.loading.artifact import Artifact
from llmc.runtime.loading.bind import RESULTS, WITHOUT_CACHE
from llmc.runtime.loading.device_manifest import DeviceManifest
from llmc.runtime.loading.integrity import Progress
from llmc.runtime.loading.manifest import Manifest
from llmc.runtime.runner import Step

if TYPE_CHECKING:
    from llmc.runtime.workers.collectives import Collectives

_FILLED_UP = ("step", "encode")


def bind_to_device(
    artifact: Artifact[Manifest], weights: list[NDArray[Any]], tokens_in: Callable[[int], int],
    collectives: Collectives | None, progress: Progress | None,
) -> tuple[PagePool, dict[str, Step]]:  # fmt: skip
    """The cache, and name -> function of index arrays alone, as `bind_to_host` gives them.

    tokens_in: how many tokens the cache is for, when so many bytes of the device are free. collectives: of a worker,
    which exchanges what its device has through the host, or with other GPUs by NCCL. Raises ArtifactError when the
    library cannot be loaded, LlmcError when the device has too little memory or fails.
    """
    loaded = _load(artifact, collectives)
    device = the_device()
    stored = device.ffi.Array(device.upload(weights, progress))
    pages = PagePool(artifact.manifest.kv, tokens_in(device.cudart.free_bytes()), partial(_pages, device))
    cache = device.ffi.Array([layer.tensor for layer in pages.layers])
    made: dict[str, Step] = {}
    for name, function in loaded.functions.items():
        bound = (stored,) if name in WITHOUT_CACHE else (cache, stored)
        if name in _FILLED_UP:
            most = _looked_at(artifact.manifest, name)
            made[name] = DeviceStep(
                device, function, bound, len(pages.groups), pages.num_pages, most, loaded.staging, loaded.agree
            )
        else:
            made[name] = partial(_call, device, function, bound, RESULTS.get(name))
    return pages, made


@dataclass(frozen=True)
class _Loaded:
    """Functions by name. staging: by which tensors are exchanged through the host within a step, if any are. agree: of
    GPUs that exchange by NCCL.
    """

    functions: dict[str, Callable[..., Any]]
    staging: StagedMemory | None = None
    agree: Callable[[bool], bool] | None = None


def _load(artifact: Artifact[Manifest], collectives: Collectives | None) -> _Loaded:
    """The library, with the collectives that it calls."""
    manifest, names = artifact.manifest, artifact.manifest.functions
    if collectives is None:
        return _Loaded(dict(zip(names, library.load_functions(artifact, names), strict=True)))
    from llmc.runtime.cuda.exchange import ADD_PARTS, by_nccl

    assert isinstance(manifest, DeviceManifest)
    staging = StagedMemory()
    collectives.register(staging)  # modules take what there is when they are loaded
    direct = by_nccl(manifest, collectives)
    if direct is None:
        return _Loaded(dict(zip(names, library.load_functions(artifact, names), strict=True)), staging)
    direct.register()
    kernels = [ADD_PARTS] if collectives.stage.size > 1 else []
    found = library.load_functions(artifact, names, kernels)
    direct.begin(the_device(), found[-1] if kernels else None)
    functions: dict[str, Callable[..., Any]] = {}
    for name, function in zip(names, found, strict=False):
        functions[name] = partial(direct.within, name, function)
    return _Loaded(functions, None if direct.has_all else staging, direct.agree)


def _looked_at(manifest: Manifest, name: str) -> int:
    """How many results of a function are looked at; zeros of a worker's sends stand behind them."""
    if isinstance(manifest, DeviceManifest):
        return min(RESULTS[name], len(manifest.ranks[manifest.rank].outputs[name]))
    return RESULTS[name]


def _pages(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DevicePages:
    return DevicePages(device, shape, dtype, SPARE_PAGES)


def _call(
    device: Device, function: Callable[..., Any], bound: tuple[Any, ...], most: int | None, *arrays: NDArray[Any]
) -> Any:
    """Call a function of arrays of the host as they are; one array, or the first `most` of its results."""
    with device.lock:
        device.last = None
        tensors = [device.tensor(array.shape, array.dtype, "what a step is given") for array in arrays]
        for tensor, array in zip(tensors, arrays, strict=True):
            device.cudart.copy(tensor.data_ptr(), array.ctypes.data, array.nbytes, TO_DEVICE, device.stream)
        with device.ffi.use_raw_stream(device.handle, device.stream):
            found = function(*tensors, *bound)
        if most is None:
            return device.read(found)
        results = [device.read(found[number]) for number in range(min(len(found), most))]
        device.wait()
        return results
