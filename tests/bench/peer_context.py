"""A llama.cpp model that reads windows of token ids and shows every logit; needs llama-cpp-python.

Below `Llama` of that package, whose table of logits for a whole window would be half a gigabyte for a vocabulary of
262,144: here one piece of a window is held at a time, in llama.cpp's own buffer.
"""

import ctypes
from collections.abc import Callable

import llama_cpp
import numpy as np
from numpy.typing import NDArray

# bool (ggml_tensor *, bool ask, void *): asked of every node before it is computed, told after it where it said yes
EvalCallback = Callable[[int, bool, object], bool]


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp logs nothing; what goes wrong is returned."""


def silence() -> None:
    """Ask for it, and make llama.cpp ready."""
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


class Context:
    """One model file, loaded, with room for one sequence of `size` tokens read in pieces of at most `piece`."""

    def __init__(self, path: str, size: int, piece: int, threads: int, callback: EvalCallback | None = None) -> None:
        silence()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, piece, piece
        params.n_threads = params.n_threads_batch = threads
        if callback is not None:
            self._callback = llama_cpp.ggml_backend_sched_eval_callback(callback)  # kept: C holds no reference
            params.cb_eval = self._callback
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"{path}: llama.cpp cannot make a context of {size} tokens")
        self._batch = llama_cpp.llama_batch_init(piece, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._read = 0

    def clear(self) -> None:
        """Forget every token read."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._read = 0

    def read(self, ids: list[int], logits: bool = True) -> NDArray[np.float32]:
        """Append `ids`; (n, V) logits after each, valid until the next call; without `logits` after the last only."""
        batch = self._batch
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place] = token
            batch.pos[place] = self._read + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = logits or place == len(ids) - 1
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp cannot decode")
        self._read += len(ids)
        rows = len(ids) if logits else 1
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(rows, self._vocab))

    def close(self) -> None:
        """Free all of it."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
