"""One placement measured once: a worker of it, or the one process of an artifact for one device; see devices.py.

    mpirun -n 2 python tests/bench/devices_case.py '{"artifact": ..., "folder": ..., ...}'

Every process keeps to one core, that of its rank, and one thread. It leaves its peak memory, rank 0 all figures, in
folder/RANK.json. Tokens are fixed ids, greedy, ends ignored; rates are of decoding alone (bench_case.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import llmc.runtime
from llmc.bench_case import decode_rate, fixed_prompt, peak_rss_bytes
from llmc.runtime.workers.attend import attend
from llmc.runtime.workers.world import place


def measure(
    artifact: str, stages: int, queries: int, prompt_tokens: int, new_tokens: int, repeats: int
) -> dict[str, float | list[float]]:
    """Tokens per second, by repeat, of one query alone, of one for each stage, of all together; seconds of loading."""
    count = max(stages, queries)
    start = time.perf_counter()
    model = llmc.runtime.load(artifact, threads=1, cache_tokens=count * (prompt_tokens + new_tokens + 32), drafts=0)
    load_s = time.perf_counter() - start
    with model:
        prompts = [fixed_prompt(index, prompt_tokens, model.manifest["vocab"]) for index in range(count)]
        model.generate_batch(prompts, max_tokens=2, ignore_eos=True)  # reads every weight, and the prompts
        together = {"speed": 1, "one_a_stage": stages, "throughput": queries}
        rates: dict[str, list[float]] = {measure: [] for measure in together}
        for _ in range(repeats):
            for measure, some in together.items():
                rates[measure].append(decode_rate(model, prompts[:some], new_tokens))
    return {**rates, "load_s": load_s}


def main() -> None:
    """Measure, or work for who measures."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    folder, rank = Path(asked.pop("folder")), place()[0]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    found = {} if attend(asked["artifact"], threads=1) else measure(**asked)
    (folder / f"{rank}.json").write_text(json.dumps({**found, "peak_rss_bytes": peak_rss_bytes()}))


if __name__ == "__main__":
    main()
