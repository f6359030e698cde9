"""Rank 0: the worker that holds the engine, and tells the others what its own module is about to run."""

from __future__ import annotations

import atexit
from functools import partial
from typing import Any

from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.errors import RequestError, WorkerLost
from llmc.runtime.loading.device_manifest import DeviceManifest
from llmc.runtime.runner import Step
from llmc.runtime.workers.calls import BEGIN, CALL, COPY, END, Answers
from llmc.runtime.workers.team import Team


class Front:
    """The front of the workers of an artifact. Page tables are its own; others have pools of as many pages."""

    def __init__(self, manifest: DeviceManifest, pool: PagePool) -> None:
        if manifest.rank != 0:
            raise RequestError(f"rank {manifest.rank} of {len(manifest.ranks)}: only rank 0 loads; others attend")
        self._manifest = manifest
        self._team: Team | None = Team(manifest)
        self._team.tell(BEGIN, pool.num_pages)
        pool.on_copy = partial(self._team.tell, COPY)
        atexit.register(self.close)

    def leading(self, functions: dict[str, Step]) -> dict[str, Step]:
        """The functions, run by all workers: of these index arrays, with what the last stage gives."""
        answers = Answers(self._manifest)
        return {name: partial(self._call, name, function, answers) for name, function in functions.items()}

    def close(self) -> None:
        """Let the others end."""
        atexit.unregister(self.close)
        if self._team is not None:
            team, self._team = self._team, None
            try:
                team.watch.check()
                team.tell(END)
                team.close()
            except WorkerLost:  # said before, where something waited for it
                team.watch.close()

    def _call(self, name: str, function: Step, answers: Answers, *arrays: NDArray[Any]) -> Any:
        if self._team is None:
            raise RequestError("the model is closed")
        watch, source = self._team.watch, answers.source(name)
        watch.check()
        self._team.tell(CALL, name, arrays)
        try:
            own = function(*arrays)
        except RuntimeError:
            watch.check()  # what is raised within a compiled function comes out of it as another error
            raise
        return answers.of(name, 0, own) if source in (0, None) else self._team.given(source)
