"""Rank 0: the worker that holds the engine, and tells the others what its own module is about to run."""

from __future__ import annotations

import atexit
import itertools
from functools import partial
from typing import Any

from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.errors import RequestError, WorkerLost
from llmc.runtime.loading.device_manifest import DeviceManifest
from llmc.runtime.runner import Step
from llmc.runtime.workers.calls import CALL, COPY, END, USE, Answers
from llmc.runtime.workers.team import Team

_MOST = 2**31 - 1  # numbers of calls begin again behind it


class Front:
    """The front of the workers of an artifact. Page tables are its own; others have pools of as many pages.

    `collectives` are those of its own module.
    """

    def __init__(self, manifest: DeviceManifest) -> None:
        if manifest.rank != 0:
            raise RequestError(f"rank {manifest.rank} of {len(manifest.ranks)}: only rank 0 loads; others attend")
        self._manifest = manifest
        self._team: Team | None = Team(manifest)
        self.collectives = self._team.collectives
        self._numbers = itertools.count()
        atexit.register(self.close)

    @property
    def stages(self) -> int:
        """Into how many stages the layers are cut."""
        return len(self._manifest.groups)

    def tokens(self, wanted: int, asked: bool) -> int:
        """Tokens that the cache is for: as many as are wanted, or as the worker with the least room has.

        Raises RequestError where it has less than somebody `asked` for.
        """
        assert self._team is not None
        least = self._team.least(wanted)
        if asked and least < wanted:
            raise RequestError(f"cache_tokens: got {wanted}, and a device has room for {least}")
        return least

    def leading(self, pool: PagePool, functions: dict[str, Step]) -> dict[str, Step]:
        """The functions, run by all workers: of these index arrays, with what the last stage gives.

        From here on the others copy pages and use memory as the pool does.

        Where there are several stages, with what waits for that: the front has done its own part by then.
        """
        pool.on_copy, pool.on_use = self._copy, self._use
        answers = Answers(self._manifest)
        return {
            name: partial(self._call, place, functions[name], name, answers, self.stages > 1)
            for place, name in enumerate(self._manifest.functions)
        }

    def give_up(self) -> None:
        """End the others, which wait for what this one will not give them any more."""
        assert self._team is not None
        self._team.watch.give_up()

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

    def _copy(self, group: int, old: int, new: int) -> None:
        if self._team is not None:
            self._team.tell(COPY, [group, old, new])

    def _use(self, group: int, pages: int) -> None:
        if self._team is not None:
            self._team.tell(USE, [group, pages])

    def _call(
        self, place: int, function: Step, name: str, answers: Answers, later: bool, *arrays: NDArray[Any]
    ) -> Any:  # fmt: skip
        team = self._team
        if team is None:
            raise RequestError("the model is closed")
        team.watch.check()
        number, source = next(self._numbers) & _MOST, answers.source(name)
        team.tell(CALL, [number, place], arrays)
        try:
            own = function(*arrays)
        except BaseException:
            team.watch.check()  # what is raised within a compiled function comes out of it as another error
            self.give_up()
            raise
        if not later:
            return answers.of(name, 0, own)
        if source in (0, None):
            return lambda: answers.of(name, 0, own)
        return team.awaiting(number)
