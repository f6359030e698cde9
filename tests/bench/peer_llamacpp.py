"""llama.cpp as one of the systems that compare.py measures, for an interpreter that has llama-cpp-python.

Below `Llama` of that package, which holds one sequence and tables of logits. The request is in peer_case.py.
"""

from __future__ import annotations

from collections.abc import Callable

import llama_cpp
import numpy as np
from peer_case import Answer, Prompts, serve, steps_of
from peer_context import silence

BATCH = 512  # tokens of one call, as llama.cpp has by default for its work


def open_model(path: str, threads: int, rows: int, tokens: int) -> Answer:
    """The model, with a cache for `rows` sequences of `tokens` tokens, otherwise as llama.cpp has it by default."""
    silence()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path}: llama.cpp cannot load it")
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max, params.n_ctx, params.n_batch, params.n_ubatch = rows, rows * (tokens + 32), BATCH, BATCH
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"{path}: llama.cpp cannot make a context of {params.n_ctx} tokens")
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def feed(tokens: list[tuple[int, int, int]], last: set[int]) -> list[int]:
        """Compute (token, position, sequence); the likeliest token after each of the places `last`."""
        batch.n_tokens = len(tokens)
        for place, (token, position, sequence) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = place in last
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama.cpp cannot decode")
        wanted = [llama_cpp.llama_get_logits_ith(context, place) for place in sorted(last)]
        return [int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax()) for logits in wanted]

    def answer(prompts: Prompts, new: int, clock: Callable[[], float]) -> list[float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        position, length, ids = 0, len(prompts[0]), list[int]()
        together = max(1, BATCH // length)  # whole prompts in one call

        def step() -> None:
            nonlocal position, ids
            if position:
                ids = feed([(token, position, row) for row, token in enumerate(ids)], set(range(len(ids))))
                position += 1
                return
            for first in range(0, len(prompts), together):
                part = list(enumerate(prompts))[first : first + together]
                rows = [(token, place, row) for row, prompt in part for place, token in enumerate(prompt)]
                ids += feed(rows, {length * (number + 1) - 1 for number in range(len(part))})
            position = length

        return steps_of(clock, step, new)

    return answer


if __name__ == "__main__":
    serve(open_model)
