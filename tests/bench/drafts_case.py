"""A peer as one of the systems that drafts.py measures: a request on standard input, rates on standard output.

Needs NumPy and what it opens. Every prompt is answered without looking it up and with it, by turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

Said = Callable[[int], None]  # so many more tokens have come
Answer = Callable[[list[int], int, bool, Said], None]  # prompt, tokens, whether it is looked up


class Rates:
    """Tokens a second of answers, from the first token to the last, by name."""

    def __init__(self) -> None:
        self._found = defaultdict[str, list[float]](list)

    @contextlib.contextmanager
    def answer(self, name: str) -> Iterator[Said]:
        """Time what is said in the block."""
        times: list[float] = []
        yield lambda tokens: times.extend([time.perf_counter()] * tokens)
        behind = sum(each > times[0] for each in times)
        if behind:  # else it was over at once
            self._found[name].append(behind / (times[-1] - times[0]))

    def median(self, name: str) -> float:
        """Of all its answers."""
        return statistics.median(self._found[name])


def open_llamacpp(model: str, threads: int) -> Answer:
    """llama-cpp-python, with its prompt lookup of 7 tokens and without."""
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def opened(drafts: Any) -> Any:
        return llama_cpp.Llama(
            model,
            n_ctx=2048,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            draft_model=drafts,
            logits_all=drafts is not None,
        )

    models = {False: opened(None), True: opened(LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=7))}

    def answer(prompt: list[int], new: int, looked_up: bool, said: Said) -> None:
        own = models[looked_up]
        own.reset()
        for number, token in enumerate(own.generate(prompt, top_k=1, temp=0.0), 1):
            said(1)
            if number == new or token == own.token_eos():
                break

    return answer


def open_openvino(model: str, threads: int) -> Answer:
    """OpenVINO GenAI, with its prompt lookup of 7 tokens and without."""
    import numpy as np
    import openvino
    import openvino_genai

    settings = {"INFERENCE_NUM_THREADS": threads}
    models = {
        looked_up: openvino_genai.LLMPipeline(
            model, "CPU", **settings, **({"prompt_lookup": True} if looked_up else {})
        )
        for looked_up in (False, True)
    }

    class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # the library's types are not here
        def __init__(self, said: Said) -> None:
            super().__init__()
            self._said = said

        def write(self, tokens: int | list[int]) -> Any:
            self._said(len(tokens) if isinstance(tokens, list) else 1)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def answer(prompt: list[int], new: int, looked_up: bool, said: Said) -> None:
        options = openvino_genai.GenerationConfig(max_new_tokens=new, do_sample=False)
        if looked_up:
            options.num_assistant_tokens, options.max_ngram_size = 7, 3
        ids = np.array([prompt], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        models[looked_up].generate(inputs, options, Streamer(said))

    return answer


def main() -> None:
    """For each kind the rates."""
    request = json.loads(sys.stdin.read())
    answer = {"llamacpp": open_llamacpp, "openvino": open_openvino}[request["open"]](
        request["model"], request["threads"]
    )
    found = {}
    for kind, prompts in request["kinds"].items():
        rates = Rates()
        for _ in range(request["rounds"]):
            for prompt in prompts:
                for looked_up in (False, True):
                    with rates.answer(str(looked_up)) as said:
                        answer(prompt, request["new"], looked_up, said)
        found[kind] = [rates.median(str(looked_up)) for looked_up in (False, True)]
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
