"""The other ranks: they wait for the front's messages, and do what these say."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.index_arrays import aligned
from llmc.runtime.loading.artifact import open_artifact
from llmc.runtime.loading.bind import bind
from llmc.runtime.loading.cpu import default_threads
from llmc.runtime.loading.device_manifest import DeviceManifest, for_devices
from llmc.runtime.loading.manifest import PAGE_TOKENS
from llmc.runtime.loading.weights import map_weights
from llmc.runtime.workers.calls import BEGIN, CALL, COPY, END, Answers
from llmc.runtime.workers.team import Team
from llmc.runtime.workers.world import launched, place


def attend(path: str | os.PathLike[str], threads: int | None = None) -> bool:
    """Be a worker of the artifact's until the front ends; False, at once, in a process that is the front or alone.

    What goes wrong here ends this process, with an error that names it; the front and the others learn of that.
    """
    if not launched() or not for_devices(Path(path).resolve()) or place()[0] == 0:
        return False
    try:
        _work(path, threads)
    except BaseException as error:
        rank, _ = place()
        reason = (str(error).splitlines() or [type(error).__name__])[-1]
        sys.stderr.write(f"Error: worker {rank}: {reason}\n")
        sys.stderr.flush()
        os._exit(1)  # the front learns of it
    return True


def threads_of(manifest: DeviceManifest, wanted: int | None) -> int:
    """Threads of a worker: as wanted, and at most, and unless wanted, its part of the CPUs.

    Workers are taken to be of one machine.
    """
    most = max(1, default_threads() // len(manifest.ranks))
    return most if wanted is None else min(wanted, default_threads())


def _work(path: str | os.PathLike[str], threads: int | None) -> None:
    artifact = open_artifact(path)
    manifest = artifact.manifest
    assert isinstance(manifest, DeviceManifest)
    team, answers = Team(manifest), Answers(manifest)
    kind, pages = team.told()
    assert kind == BEGIN, f"the front began with {kind!r}"
    pool = PagePool(manifest.kv, pages * PAGE_TOKENS)
    weights = map_weights(artifact.path(manifest.weights), manifest.order)
    functions = bind(artifact, pool.layers, weights, threads_of(manifest, threads))
    while (message := team.told())[0] != END:
        if message[0] == COPY:
            pool.copy(*message[1:])
            continue
        assert message[0] == CALL, f"the front said {message[0]!r}"
        _, name, arrays = message
        given = functions[name](*_aligned(arrays))
        if answers.source(name) == manifest.rank:
            team.give(answers.of(name, manifest.rank, given))
    team.close()


def _aligned(arrays: tuple[NDArray[Any], ...]) -> list[NDArray[Any]]:
    """Copies as kernels want them, each at a multiple of 64 bytes."""
    fresh = [to.reshape(array.shape) for to, array in zip(aligned([a.size for a in arrays]), arrays, strict=True)]
    for to, array in zip(fresh, arrays, strict=True):
        to[...] = array
    return fresh
