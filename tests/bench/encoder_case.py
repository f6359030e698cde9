"""An encoder as one of the systems that encoders.py measures: a request on standard input, seconds on standard output.

An interpreter needs what it opens and NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np

Read = Callable[[np.ndarray], object]  # reads a batch of texts (n, tokens)


def open_llmc(model: str, threads: int) -> Read:
    """Vectors of texts, pooled."""
    import llmc
    from llmc.runtime.encoder import encode_rows, pool
    from llmc.runtime.loading.manifest import Pooling

    engine, mean = llmc.load(model, threads=threads).engine, Pooling("mean", True)
    return lambda ids: [pool(mean, rows) for _, rows in encode_rows(engine, ids.tolist())]


def open_onnxruntime(model: str, threads: int) -> Read:
    """Outputs of all tokens."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options)
    names = {each.name for each in session.get_inputs()}
    return lambda ids: session.run(None, _inputs(ids, names))


def open_openvino(model: str, threads: int) -> Read:
    """Outputs of all tokens; in the precision that OpenVINO chooses here."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    names = {each.get_any_name() for each in compiled.inputs}
    request = compiled.create_infer_request()
    return lambda ids: request.infer(_inputs(ids, names))


def _inputs(ids: np.ndarray, names: set[str]) -> dict[str, np.ndarray]:
    every = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {name: value for name, value in every.items() if name in names}


def main() -> None:
    """For each batch the seconds of each repeat, after one that warms up."""
    request = json.loads(sys.stdin.read())
    openers = {"llmc": open_llmc, "onnxruntime": open_onnxruntime, "openvino": open_openvino}
    read = openers[request["open"]](request["model"], request["threads"])
    rng, times = np.random.default_rng(0), []
    for texts, tokens in request["batches"]:
        seconds = []
        for _ in range(request["repeats"] + 1):
            ids = rng.integers(1000, 20000, (texts, tokens))
            start = time.perf_counter()
            read(ids)
            seconds.append(time.perf_counter() - start)
        times.append(seconds[1:])
    print(json.dumps(times), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
