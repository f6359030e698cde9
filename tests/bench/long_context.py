"""What a long text costs: decoding after 128 to 8,192 tokens, and prefill of 512 more tokens there.

    python tests/bench/long_context.py [--artifact NAME.llmc] [--threads 2]

One text is read up to each depth; there some tokens are decoded one by one and a chunk is read, and both are taken
back. "against first" is the decoding rate over that of the first depth. What a decoding step takes longer than at the
first depth goes to reading more K and V: "kv read share" is the rate at which it reads them over the rate at which this
machine reads memory at all. On one thread seconds are those the CPU works, so others on the machine disturb less.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import numpy as np
from engine_case import Clock, Row, arguments, medians, show, with_artifact

import llmc
from llmc.bench_case import fixed_prompt
from llmc.read_speed import buffer_bytes, read_bytes_per_s

_PIECE_BYTES = 4 << 20  # one call of a reduction
DEPTHS = (128, 1024, 2048, 4096, 8192)


def read_limit(threads: int, clock: Clock) -> float:
    """Bytes per second at which memory can be read, by the same clock as what is compared with it."""
    if threads > 1:
        return read_bytes_per_s(threads)
    buffer, best = np.ones(buffer_bytes() // 8, np.uint64), 0.0
    for _ in range(5):
        start = clock.now()
        for part in np.array_split(buffer, buffer.nbytes // _PIECE_BYTES):
            part.max()
        best = max(best, buffer.nbytes / (clock.now() - start))
    return best


def kv_bytes(runner: Any, tokens: int) -> int:
    """Bytes of K and V that a row reads after so many tokens."""
    pool, page_tokens = runner.pool, 16
    seen = [(len(group.layers), min(tokens, group.window or tokens)) for group in pool.groups]
    return sum(layers * -(-count // page_tokens) * int(pool.layers[0][0].nbytes) for layers, count in seen)


def seconds_of(runner: Any, sequence: Any, ids: list[int], clock: Clock) -> float:
    """Seconds of one step that appends these tokens."""
    start = clock.now()
    runner.step([(sequence, ids)])
    return clock.now() - start


def read_to(runner: Any, sequence: Any, ids: list[int], chunk: int) -> None:
    """Append tokens until the sequence has all of `ids`."""
    while sequence.length < len(ids):
        runner.step([(sequence, ids[sequence.length :][:chunk])])


def one_round(runner: Any, ids: list[int], depths: list[int], chunk: int, decoded: int, clock: Clock) -> dict[str, Row]:
    """Seconds of a decoding step (median) and of a chunk at each depth."""
    sequence, rows = runner.new_sequence(), {}
    for depth in depths:
        read_to(runner, sequence, ids[:depth], chunk)
        steps = [seconds_of(runner, sequence, ids[depth + n : depth + n + 1], clock) for n in range(decoded)]
        runner.truncate(sequence, depth)
        prefill = seconds_of(runner, sequence, ids[depth : depth + chunk], clock)
        runner.truncate(sequence, depth)
        rows[f"{depth} tokens"] = {"decode_s": statistics.median(steps), "prefill_s": prefill}
    runner.release(sequence)
    return rows


def rates(rounds: list[dict[str, Row]], runner: Any, depths: list[int], chunk: int, limit: float) -> list[Row]:
    """The rows of the table, from seconds."""
    found = medians(rounds)
    first, least = found[0]["decode_s"], kv_bytes(runner, depths[0])
    rows = []
    for depth, row in zip(depths, found, strict=True):
        more = row["decode_s"] - first
        share = (kv_bytes(runner, depth) - least) / more / limit if more > 0 else None
        rows.append(
            {
                "": row[""],
                "decode_tokens_per_s": 1 / row["decode_s"],
                "against_first": first / row["decode_s"],
                "kv_mb": kv_bytes(runner, depth) / 1e6,
                "kv_read_share": share,
                "prefill_tokens_per_s": chunk / row["prefill_s"],
            }
        )
    return rows


def main() -> None:
    """Run the rounds, print the table."""
    options = arguments(__doc__, threads=1, rounds=3, chunk=512, decoded=16).parse_args()

    def measure(artifact: Path) -> list[Row]:
        clock = Clock(options.threads)
        limit = read_limit(options.threads, clock)
        with llmc.load(
            artifact, threads=options.threads, cache_tokens=DEPTHS[-1] + 2 * options.chunk, drafts=0
        ) as model:
            runner, room = model.runner, model.manifest["context"] - options.chunk
            depths = sorted({min(depth, room) for depth in DEPTHS})
            ids = fixed_prompt(0, depths[-1] + max(options.chunk, options.decoded), model.manifest["vocab"])
            rounds = [
                one_round(runner, ids, depths, options.chunk, options.decoded, clock) for _ in range(options.rounds)
            ]
            return rates(rounds, runner, depths, options.chunk, limit)

    show(f"A long text, {options.threads} threads", with_artifact(options.artifact, measure), options.json)


if __name__ == "__main__":
    main()
