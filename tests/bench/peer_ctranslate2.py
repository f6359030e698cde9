"""CTranslate2 as one of the systems that compare.py measures, for an interpreter that has ctranslate2.

The model is a folder of `ct2-transformers-converter`. The request is in peer_case.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
from peer_case import Answer, Prompts, serve


def open_model(path: str, threads: int, rows: int, tokens: int) -> Answer:
    """The model with the weights it was converted to, on `threads` threads."""
    words = json.loads((Path(path) / "vocabulary.json").read_text(encoding="utf-8"))
    model = ctranslate2.Generator(path, device="cpu", inter_threads=1, intra_threads=threads)

    def answer(prompts: Prompts, new: int, clock: Callable[[], float]) -> list[float]:
        given = [[words[token] for token in prompt] for prompt in prompts]
        times = [0.0] * new
        start = clock()

        def note(result: Any) -> bool:  # called for each row of each step
            times[result.step] = clock() - start
            return False

        model.generate_batch(
            given, max_length=new, min_length=new, include_prompt_in_result=False, sampling_topk=1, callback=note
        )
        assert all(times)
        return times

    return answer


if __name__ == "__main__":
    serve(open_model)
