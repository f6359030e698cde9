"""ONNX Runtime GenAI as one of the systems that compare.py measures, for an interpreter that has onnxruntime-genai.

The model is a folder of `onnxruntime_genai.models.builder`. The request is in peer_case.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import onnxruntime_genai as og
from peer_case import Answer, Prompts, serve, steps_of


def open_model(path: str, threads: int, rows: int, tokens: int) -> Answer:
    """The model as its builder wrote it, on `threads` threads; each answer has a cache of just its size."""
    config = og.Config(path)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = og.Model(config)

    def answer(prompts: Prompts, new: int, clock: Callable[[], float]) -> list[float]:
        params, length = og.GeneratorParams(model), len(prompts[0]) + new
        params.set_search_options(
            do_sample=False, batch_size=len(prompts), min_length=length, max_length=length, num_beams=1
        )
        generator = og.Generator(model, params)
        waiting = [np.array(prompts, np.int32)]

        def step() -> None:
            if waiting:
                generator.append_tokens(waiting.pop())
            generator.generate_next_token()

        return steps_of(clock, step, new)

    return answer


if __name__ == "__main__":
    serve(open_model)
