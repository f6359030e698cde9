"""llmc as one of the systems that compare.py measures; the request is in peer_case.py. It may take --copy-weights."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

from peer_case import Answer, Prompts, serve

import llmc.runtime
from llmc.runtime import Options


def open_model(path: str, threads: int, rows: int, tokens: int) -> Answer:
    """The artifact, and room for `rows` sequences."""
    model = llmc.runtime.load(
        path,
        threads=threads,
        cache_tokens=rows * (tokens + 32),
        drafts=0,
        copy_weights="--copy-weights" in sys.argv or None,
    )

    def answer(prompts: Prompts, new: int, clock: Callable[[], float]) -> list[float]:
        options = Options(max_tokens=new, ignore_eos=True)
        start = clock()
        times: dict[int, list[float]] = {model.add(prompt, options): [] for prompt in prompts}
        for result in model.engine.follow(times):
            times[result.id].append(clock() - start)
        model.engine.forget_prefixes()
        # A step ends with the last of its rows; the result that says "done" is no token of its own.
        return [max(each) for each in itertools.islice(zip(*times.values(), strict=False), new)]

    return answer


if __name__ == "__main__":
    serve(open_model)
