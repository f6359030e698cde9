"""OpenVINO GenAI as one of the systems that compare.py measures, for an interpreter that has openvino-genai.

The model is a folder of `optimum-cli export openvino`. The request is in peer_case.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import openvino
import openvino_genai
from peer_case import Answer, Prompts, serve


def open_model(path: str, threads: int, rows: int, tokens: int) -> Answer:
    """The pipeline as it comes, on `threads` threads; it makes room for sequences as it needs it."""
    pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def answer(prompts: Prompts, new: int, clock: Callable[[], float]) -> list[float]:
        options = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start, wall = clock(), time.perf_counter()
        result = pipeline.generate(inputs, options)
        seconds, wall = clock() - start, time.perf_counter() - wall
        assert all(len(each) == new for each in result.tokens)
        # Steps are the pipeline's own measurement, scaled to our clock where that counts the CPU's work.
        metrics = result.perf_metrics
        ends = metrics.raw_metrics.m_new_token_times  # milliseconds
        assert len(ends) == new
        first = metrics.get_ttft().mean
        return [(first + end - ends[0]) / 1000 * seconds / wall for end in ends]

    return answer


if __name__ == "__main__":
    serve(open_model)
