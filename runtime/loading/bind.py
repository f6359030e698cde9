"""The compiled functions of an artifact as a Runner calls them: of arrays, with cache, weights and threads bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.loading import library
from llmc.runtime.loading.artifact import Artifact
from llmc.runtime.loading.crowding import Crowding
from llmc.runtime.loading.manifest import Manifest
from llmc.runtime.loading.one_thread import OneThread
from llmc.runtime.loading.weights import ALIGN, Weights
from llmc.runtime.parts import Parts
from llmc.runtime.runner import Step

# Function -> how many of its results are looked at, at most; what follows only had to happen. Others give one array.
RESULTS = {"step": 4, "encode": 2, "turn": 0, "head": 4}
WITHOUT_CACHE = ("embed", "head")


def bind_to_host(
    artifact: Artifact[Manifest], pages: list[NDArray[Any]], weights: Weights, threads: int
) -> dict[str, Step]:
    """Name -> function, of index arrays alone, for all functions of the artifact; `pages`: of each layer of the cache.

    Raises ArtifactError when its library cannot be loaded.
    """
    library.set_most_threads(threads)
    ffi = library.import_ffi()
    names = artifact.manifest.functions
    functions = library.load_functions(artifact, names)

    def tensors(arrays: list[NDArray[Any]]) -> Any:
        return ffi.Array([ffi.from_dlpack(a, require_alignment=ALIGN, require_contiguous=True) for a in arrays])

    item = ffi.get_global_func("ffi.ArrayGetItem")  # what found[number] calls, at half its price
    cache, stored = tensors(pages), tensors(weights.arrays)
    thread, crowding = OneThread(), Crowding(threads)

    def call(name: str, function: Callable[..., Any], *arrays: NDArray[Any]) -> Any:
        return thread.run(partial(called, name, function, arrays))

    def called(name: str, function: Callable[..., Any], arrays: tuple[NDArray[Any], ...]) -> Any:
        library.use_threads(crowding.begin())
        bound = (stored,) if name in WITHOUT_CACHE else (cache, stored)
        start = time.perf_counter()
        found = function(*map(ffi.from_dlpack, arrays), *bound)
        seconds = time.perf_counter() - start
        crowding.end()
        weights.worked(seconds)
        if name not in RESULTS:
            return np.from_dlpack(found)
        return [np.from_dlpack(item(found, number)) for number in range(min(len(found), RESULTS[name]))]

    return {name: partial(call, name, each) for name, each in zip(names, functions, strict=True)}


def parts_of(manifest: Manifest, functions: dict[str, Step]) -> Parts | None:
    """The step in parts, where it was compiled so."""
    if not manifest.parts:
        return None
    parts = tuple(functions[f"part_{number}"] for number in range(len(manifest.parts)))
    return Parts(functions["embed"], parts, functions["head"])
