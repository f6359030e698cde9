"""The cache of a loaded artifact and its functions, on whatever its code is for: a CPU or a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.loading.artifact import Artifact
from llmc.runtime.loading.bind import bind_to_host
from llmc.runtime.loading.integrity import Progress
from llmc.runtime.loading.manifest import Manifest
from llmc.runtime.loading.weights import Weights
from llmc.runtime.runner import Step

if TYPE_CHECKING:
    from llmc.runtime.workers.collectives import Collectives

_HOST_SHARE = 0.5  # of the machine's memory for the cache, at most
_DEVICE_SHARE = 0.6  # of what is free on a device: steps of all sizes need the rest


def bind(
    artifact: Artifact[Manifest], weights: Weights, threads: int, tokens_in: Callable[[int], int],
    collectives: Collectives | None = None, progress: Progress | None = None,
) -> tuple[PagePool, dict[str, Step]]:  # fmt: skip
    """The cache, and name -> function, of index arrays alone, for all functions of the artifact.

    tokens_in: how many tokens the cache is for, of so many bytes. collectives: of a worker. progress("upload", done,
    total) is called while weights go to a GPU. Raises ArtifactError when the library cannot be loaded, LlmcError when a
    device has too little memory or fails.
    """
    if artifact.variant.device is not None:
        from llmc.runtime.cuda.bind import bind_to_device  # with CUDA's libraries

        return bind_to_device(
            artifact, weights.arrays, lambda free: tokens_in(int(free * _DEVICE_SHARE)), collectives, progress
        )  # fmt: skip
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pages = PagePool(artifact.manifest.kv, tokens_in(int(memory * _HOST_SHARE)))
    if collectives is not None:
        from llmc.runtime.workers.collectives import HostMemory

        collectives.register(HostMemory())
    return pages, bind_to_host(artifact, pages.layers, weights, threads)
