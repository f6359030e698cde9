"""The other ranks: they wait for the front's messages, and do what these say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from llmc.runtime.bound import bind
from llmc.runtime.errors import ArtifactError, LlmcError
from llmc.runtime.loading.artifact import Artifact, open_artifact
from llmc.runtime.loading.cpu import default_threads
from llmc.runtime.loading.device_manifest import DeviceManifest, for_devices, read_device_manifest
from llmc.runtime.loading.manifest import Manifest
from llmc.runtime.loading.weights import map_weights
from llmc.runtime.workers.calls import CALL, COPY, END, USE, Answers
from llmc.runtime.workers.member import complain
from llmc.runtime.workers.team import Team
from llmc.runtime.workers.world import Leave, launched, place

_ANY = 2**31 - 1


def attend(
    path: str | os.PathLike[str], threads: int | None = None, copy_weights: bool | None = None
) -> bool:  # fmt: skip
    """Be a worker of the artifact's until the front ends; False, at once, in a process that is the front or alone.

    threads, copy_weights: as of `load`. What goes wrong here ends this process, with an error that names it; the front
    and the others learn of that.
    """
    if not launched() or not for_devices(Path(path).resolve()) or place()[0] == 0:
        return False
    try:
        _work(path, threads, copy_weights)
    except (KeyboardInterrupt, SystemExit):
        os._exit(1)  # whoever asked for it knows
    except BaseException as error:
        reason, rank = reason_of(error), place()[0]
        if not complain(reason):
            sys.stderr.write(f"llmc: worker {rank}{_device(path, rank)}: {reason}\n")
            Leave.fail()
        os._exit(1)  # the front learns of it
    return True


def _device(path: str | os.PathLike[str], rank: int) -> str:
    """What is said of a rank's device; nothing where the artifact does not tell, or has none for it."""
    try:
        return f" (device {read_device_manifest(Path(path).resolve()).ranks[rank].device})"
    except (ArtifactError, IndexError):
        return ""


def reason_of(error: BaseException) -> str:
    """What to say of an error, on one line; one that came out of a compiled function has a traceback in its text."""
    kind = "" if isinstance(error, LlmcError) else type(error).__name__
    if isinstance(error, MemoryError):
        kind = "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) if isinstance(error, LlmcError) else (lines or [""])[-1]
    return ": ".join(part for part in (kind, text) if part)


def threads_of(manifest: DeviceManifest, wanted: int | None) -> int:
    """Threads of a worker: as wanted, and at most, and unless wanted, its part of the CPUs.

    Workers are taken to be of one machine.
    """
    most = max(1, default_threads() // len(manifest.ranks))
    return most if wanted is None else min(wanted, default_threads())


def _most_tokens(artifact: Artifact[Manifest], room: int) -> int:
    """Tokens that a worker's cache may be for: the host's memory is taken only as it fills, and the front decides."""
    return _ANY if artifact.variant.device is None else max(1, room // artifact.manifest.kv.token_bytes)


def _work(path: str | os.PathLike[str], threads: int | None, copy_weights: bool | None) -> None:
    artifact = open_artifact(path)
    manifest = artifact.manifest
    assert isinstance(manifest, DeviceManifest)
    team, answers = Team(manifest), Answers(manifest)
    weights = map_weights(artifact.path(manifest.weights), manifest.order, copy_weights)
    pool, functions = bind(
        artifact, weights, threads_of(manifest, threads), lambda room: team.least(_most_tokens(artifact, room)),
        team.collectives,
    )  # fmt: skip
    while (message := team.told()).kind != END:
        if message.kind == COPY:
            pool.copy(*message.numbers)
            continue
        if message.kind == USE:
            pool.use(*message.numbers)
            continue
        assert message.kind == CALL, f"the front said {message.kind}"
        number, place = message.numbers
        name = manifest.functions[place]
        given = functions[name](*message.arrays)
        if answers.source(name) == manifest.rank:
            team.give(number, [np.asarray(each) for each in answers.of(name, manifest.rank, given)])
    team.close()
