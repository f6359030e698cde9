"""One case of `llmc bench`, in a process of its own: `python -m llmc.bench_case '{...}'`.

A process per case, so that its peak memory is its own and no other case has warmed its threads.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from llmc.options import start_workers
from llmc.runtime.workers.member import membership
from llmc.runtime.workers.world import launched


def main() -> None:
    """Measure the case in the first argument and print the row as JSON."""
    case = json.loads(sys.argv[1])
    try:
        with membership():
            _run(case, case.pop("devices", False))
    except KeyboardInterrupt:
        sys.exit(130)


def _run(case: dict[str, Any], devices: bool) -> None:
    try:
        if devices and not launched():
            start_workers(case["artifact"], "llmc.bench_case", sys.argv[1:])
        row = {"read_bytes_per_s": _read(case)} if case.get("only_read") else measure(**case)
    except Exception as error:  # one line for the parent, which shows it as its own
        from llmc.cli import explain

        sys.exit(explain(error))
    if row is not None:
        print(json.dumps(row))


def _read(case: dict[str, Any]) -> float:
    from llmc.read_speed import read_bytes_per_s

    return read_bytes_per_s(case["threads"])


def measure(
    artifact: str, threads: int, batch: int, prompt_tokens: int, new_tokens: int, repeats: int,
    copy_weights: bool | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Return prefill and decode rates of every repeat, load time and peak memory of each worker, in bytes.

    None in a worker that is not the front. Prompts are fixed token ids, one different prompt per sequence; greedy; the
    end is ignored. No token is drafted: what a guess saves is the text's doing.
    """
    import llmc.runtime
    from llmc.runtime.workers.attend import attend
    from llmc.runtime.workers.world import to_front

    if attend(artifact, threads, copy_weights):
        to_front(peak_rss_bytes())
        return None
    start = time.perf_counter()
    cache_tokens = batch * (prompt_tokens + new_tokens + 32)  # prompts that an encoder reads have pages of their own
    model = llmc.runtime.load(artifact, threads=threads, cache_tokens=cache_tokens, drafts=0, copy_weights=copy_weights)
    load_s = time.perf_counter() - start
    with model:
        vocab = model.manifest["vocab"]
        prompts = [fixed_prompt(index, prompt_tokens, vocab) for index in range(batch)]
        model.generate_batch(prompts, max_tokens=2, ignore_eos=True)  # touches every weight once
        prefill, decode = [], []
        workers = "devices" in model.manifest
        for _ in range(repeats):
            model.engine.forget_prefixes()
            prefill.append(prefill_rate(model, prompts))
            decode.append(decode_rate(model, prompts, new_tokens))
    return {
        "prefill": prefill,
        "decode": decode,
        "load_s": load_s,
        "peak_rss": (to_front(peak_rss_bytes()) if workers else None) or [peak_rss_bytes()],
    }


def prefill_rate(model: Any, prompts: list[list[int]]) -> float:
    """Return prompt tokens read per second, of prompts that come together; with the last comes its first token."""
    results = model.generate_batch(prompts, max_tokens=1, ignore_eos=True)
    return sum(map(len, prompts)) / max(result.timings["prefill_s"] for result in results)


def decode_rate(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Return tokens made per second while all prompts are being answered: from the last's first to the first's last.

    What `prefill_rate` has read is not read again, so that decoders begin together.
    """
    from llmc.runtime import Options

    options = Options(max_tokens=new_tokens, ignore_eos=True)
    times: dict[int, list[float]] = {model.add(prompt, options): [] for prompt in prompts}
    for result in model.engine.follow(times):
        times[result.id].append(time.perf_counter())
        if result.done is not None and result.done.finish_reason != "length":
            sys.exit(f"{len(prompts[0])} + {new_tokens} tokens are more than the model's context")
    start, end = max(each[0] for each in times.values()), min(each[-1] for each in times.values())
    made = sum(start < at <= end for each in times.values() for at in each)
    if not made:
        sys.exit(f"{new_tokens} new tokens are too few to time {len(prompts)} prompts that are answered together")
    return made / (end - start)


def fixed_prompt(index: int, tokens: int, vocab: int) -> list[int]:
    """Return the token ids of prompt number `index`: the same on every machine and run.

    >>> fixed_prompt(0, 3, 1000) == fixed_prompt(0, 3, 1000)
    True
    """
    ids = np.random.default_rng(index).integers(0, vocab, tokens)
    return [int(i) for i in ids]


def peak_rss_bytes() -> int:
    """Return the most memory this process held, mapped weights included.

    Linux's VmHWM and not `ru_maxrss`, which a child inherits from the process that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
