"""One case on llama.cpp, run by an interpreter that has llama-cpp-python: prints rates as JSON.

python peer_llamacpp.py '{"model": "x.gguf", "threads": 2, "prompt": [...], "new_tokens": 64, "repeats": 3}'
"""

import json
import sys
import time

from llama_cpp import Llama


def main() -> None:
    """Prefill the prompt in one batch, then decode greedily, `repeats` times."""
    case = json.loads(sys.argv[1])
    prompt, new = case["prompt"], case["new_tokens"]
    model = Llama(
        case["model"], n_ctx=len(prompt) + new + 16, n_batch=512, n_threads=case["threads"],
        n_threads_batch=case["threads"], verbose=False,
    )  # fmt: skip
    prefill, decode = [], []
    for _ in range(case["repeats"] + 1):
        model.reset()
        start = time.perf_counter()
        model.eval(prompt)
        middle = time.perf_counter()
        for _ in range(new):
            model.eval([model.sample(temp=0.0)])
        end = time.perf_counter()
        prefill.append(len(prompt) / (middle - start))
        decode.append(new / (end - middle))
    print(json.dumps({"prefill": prefill[1:], "decode": decode[1:]}))


if __name__ == "__main__":
    main()
