"""The compiled functions of an artifact for CUDA as a Runner calls them, with the cache and weights on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.cuda.cudart import TO_DEVICE
from llmc.runtime.cuda.device import Device, Progress, the_device
from llmc.runtime.cuda.padding import SPARE_PAGES
from llmc.runtime.cuda.pages import DevicePages
from llmc.runtime.cuda.staging import StagedMemory
from llmc.runtime.cuda.steps import DeviceStep
from llmc.runtime.loading import library
from llmc.runtime.loading.artifact import Artifact
from llmc.runtime.loading.bind import RESULTS, WITHOUT_CACHE
from llmc.runtime.loading.device_manifest import DeviceManifest
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
    which exchanges what its device has through the host, or by NCCL within a stage of GPUs. Raises ArtifactError when
    the library cannot be loaded, LlmcError when the device has too little memory or fails.
    """
    staging, functions = _load(artifact, collectives)
    device = the_device()
    stored = device.ffi.Array(device.upload(weights, progress))
    pages = PagePool(artifact.manifest.kv, tokens_in(device.cudart.free_bytes()), partial(_pages, device))
    cache = device.ffi.Array([layer.tensor for layer in pages.layers])
    made: dict[str, Step] = {}
    for name, function in functions.items():
        bound = (stored,) if name in WITHOUT_CACHE else (cache, stored)
        if name in _FILLED_UP:
            most = _looked_at(artifact.manifest, name)
            made[name] = DeviceStep(device, function, bound, len(pages.groups), pages.num_pages, most, staging)
        else:
            made[name] = partial(_call, device, function, bound, RESULTS.get(name))
    return pages, made


def _load(
    artifact: Artifact[Manifest], collectives: Collectives | None
) -> tuple[StagedMemory | None, dict[str, Callable[..., Any]]]:
    """By which tensors are exchanged through the host within a step, if any are, and name -> function."""
    manifest, names = artifact.manifest, artifact.manifest.functions
    if collectives is None:
        return None, dict(zip(names, library.load_functions(artifact, names), strict=True))
    assert isinstance(manifest, DeviceManifest)
    staging, direct = StagedMemory(), None
    collectives.register(staging)  # modules take what there is when they are loaded
    if manifest.shared_by_gpus(manifest.ranks[manifest.rank].stage):
        from llmc.runtime.cuda.exchange import ADD_PARTS, by_nccl

        direct = by_nccl(collectives)
    if direct is None:
        return staging, dict(zip(names, library.load_functions(artifact, names), strict=True))
    direct.register()
    *functions, add_parts = library.load_functions(artifact, names, [ADD_PARTS])
    direct.begin(the_device(), add_parts)
    found: dict[str, Callable[..., Any]] = {}
    for name, function in zip(names, functions, strict=True):
        found[name] = partial(direct.within, name, function)
    return staging if len(manifest.groups) > 1 else None, found


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
