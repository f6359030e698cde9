"""How far llama.cpp's models are from a reference, run by an interpreter that has llama-cpp-python: prints JSON.

python peer_eval.py '{"reference": "f32.gguf", "models": {"Q4_0": "q4_0.gguf"}, "windows": "ids.json", "threads": 2}'

"windows" names a JSON file with lists of token ids. Each is read from an empty cache; its first token is not scored.
Every model reads a piece of a window right after the reference did, so that only one piece's logits are held.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from peer_context import Context

PIECE = 128  # tokens read at once: 134 MB of logits for each model where the vocabulary is 262,144


def main() -> None:
    """Read the request, print figures by model."""
    request = json.loads(sys.argv[1])
    windows = json.loads(Path(request["windows"]).read_text())
    print(json.dumps(evaluate(request["reference"], request["models"], windows, request["threads"])))


def evaluate(reference: str, models: dict[str, str], windows: list[list[int]], threads: int) -> dict[str, object]:
    """Figures of each model, and of the reference itself under the name "reference" (its kl is 0)."""
    size = len(windows[0])
    contexts = {name: Context(path, size, PIECE, threads) for name, path in {"": reference, **models}.items()}
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in contexts}
    seconds = dict.fromkeys(contexts, 0.0)
    for number, ids in enumerate(windows):
        for context in contexts.values():
            context.clear()
        for at in range(0, size - 1, PIECE):
            stop = min(at + PIECE, size - 1)
            expected = None
            for name, context in contexts.items():
                start = time.perf_counter()
                logits = context.read(ids[at:stop])
                seconds[name] += time.perf_counter() - start
                logs = log_softmax(logits)
                expected = logs if expected is None else expected
                found[name].append(score(expected, logs, np.asarray(ids[at + 1 : stop + 1])))
        print(f"window {number + 1}/{len(windows)}", file=sys.stderr)
    figures = {}
    for name, context in contexts.items():
        context.close()
        nll, kl, same = np.concatenate(found[name], axis=1)
        figures[name or "reference"] = {
            "tokens": len(nll), "perplexity": float(np.exp(nll.mean())), "kl": float(kl.mean()),
            "kl_standard_error": float(kl.std(ddof=1) / np.sqrt(len(kl))), "kl_99": float(np.quantile(kl, 0.99)),
            "top1": float(same.mean()), "prefill": len(nll) / seconds[name],
        }  # fmt: skip
    return figures


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, V) logits -> (n, V) log probabilities; row by row, so that the passes stay in the cache."""
    out = np.empty_like(logits)
    for row, into in zip(logits, out, strict=True):
        np.subtract(row, row.max(), out=into)
        into -= np.float32(np.log(np.exp(into).sum(dtype=np.float64)))
    return out


def score(expected: NDArray[np.float32], got: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """(3, n): negative log-likelihood of `targets` under `got`, KL(expected || got), same likeliest token; nats."""
    nll = -np.take_along_axis(got, targets[:, None], 1)[:, 0].astype(np.float64)
    kl, same = np.empty(len(got)), np.empty(len(got))
    for row, (p, q) in enumerate(zip(expected, got, strict=True)):
        kl[row] = np.dot(np.exp(p), p - q)
        same[row] = p.argmax() == q.argmax()
    return np.stack([nll, np.maximum(kl, 0), same])


if __name__ == "__main__":
    main()
