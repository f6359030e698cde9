"""Models on a GPU against the same models on the CPU: logits, tokens, many queries in a small cache.

    python tests/gpu/check_models.py PACK [--json FILE]

PACK/models has artifacts for both. Needs llmc's runtime alone. Ends with 1 if a check fails; prompts are other ones at
every run, by a seed that is printed, or those in a file beside the artifact, a line each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime import ArtifactError, load
from llmc.runtime.model import Model

PROMPTS, NEW_TOKENS = 20, 16
# By the kind of KV pages: how far logits may be from the CPU's, of their size. Both round what they write to pages, and
# what is near the middle of two codes one way or the other.
LIMITS = {"f32": 2e-4, "bf16": 2e-2, "q8": 2e-2, "q4": 5e-2}
# Of the CPU's own distance from a model of float32 that lies beside the artifact, where that is more than the limit.
NO_FURTHER = 1.25
Row = dict[str, Any]


def prompts_of(model: Model, seed: int, count: int, longest: int) -> list[list[int]]:
    """Token ids of prompts of different lengths; every third begins as the first one does."""
    random = np.random.default_rng(seed)
    vocab = model.manifest["vocab"]
    made = [random.integers(0, vocab, random.integers(1, longest)).tolist() for _ in range(count)]
    return [made[0][:40] + prompt if number % 3 == 2 else prompt for number, prompt in enumerate(made)]


def logits(model: Model, prompt: list[int]) -> np.ndarray:
    """Of the last token, read in two steps."""
    runner = model.runner
    sequence = runner.new_sequence()
    try:
        if len(prompt) > 1:
            runner.step([(sequence, prompt[:-1])])
        return runner.step([(sequence, prompt[-1:])]).logits[0]
    finally:
        runner.release(sequence)


@contextmanager
def loaded(artifact: Path, device: bool, **options: Any) -> Iterator[Model]:
    """The artifact on the GPU, or on the CPU."""
    variants = json.loads((artifact / "manifest.json").read_text())["variants"]
    names = [each["name"] for each in variants if (each.get("device") is not None) == device]
    for name in names:  # of several for CPUs the first one that this one runs
        os.environ["LLMC_VARIANT"] = name
        try:
            model = load(artifact, **options)
        except ArtifactError:
            if name == names[-1]:
                raise
        else:
            with model:
                yield model
            return


def check(artifact: Path, seed: int, prompts: int, longest: int, tokens: int) -> Row:
    """One model; what was found."""
    start = time.perf_counter()
    with loaded(artifact, device=False) as model:
        texts = artifact.with_suffix(".txt")
        if texts.exists():
            asked = [model.encode(line) for line in texts.read_text().splitlines()]
            prompts = len(asked)
        else:
            asked = prompts_of(model, seed, prompts, longest)
        wanted_rows = [logits(model, prompt) for prompt in asked]
        wanted = [model.generate(prompt, max_tokens=tokens, ignore_eos=True).ids for prompt in asked]
        floats = _floats(artifact.with_suffix(".float"), asked)
        kind = model.manifest["kv"]["dtype"]
    before = time.perf_counter()
    with loaded(artifact, device=True, cache_tokens=16 * (longest + 60)) as model:
        load_s = time.perf_counter() - before
        found = [logits(model, prompt) for prompt in asked]
        worst = max(map(difference, found, wanted_rows))
        alone = [model.generate(prompt, max_tokens=tokens, ignore_eos=True).ids for prompt in asked]
    pressed = {}
    for preemption in ("recompute", "swap"):
        with loaded(artifact, True, cache_tokens=longest + tokens + 80, preemption=preemption) as model:
            together = [each.ids for each in model.generate_batch(asked, max_tokens=tokens, ignore_eos=True)]
            pressed[preemption] = (together == alone, model.engine.stats.preempted)
            model.engine.forget_prefixes()
            model.runner.pool.check([])
    agreeing = sum(mine == theirs for mine, theirs in zip(alone, wanted, strict=True))
    row: Row = {
        "model": artifact.name.removesuffix(".llmc"), "kv": kind, "worst_logit": worst, "agreeing": agreeing,
        "prompts": prompts,
        "same_together": all(same for same, _ in pressed.values()),
        "preempted": [count for _, count in pressed.values()], "load_s": load_s,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    close = worst <= LIMITS[kind]
    if floats is not None:
        row["off_cpu"], row["off"] = (max(map(difference, rows, floats)) for rows in (wanted_rows, found))
        close = row["off"] <= max(LIMITS[kind], NO_FURTHER * row["off_cpu"])
    row["passed"] = close and bool(row["same_together"]) and (kind != "f32" or agreeing == prompts)
    return row


def _floats(reference: Path, asked: list[list[int]]) -> list[np.ndarray] | None:
    """What the model of float32 says on the CPU, if there is one."""
    if not reference.exists():
        return None
    os.environ.pop("LLMC_VARIANT", None)
    with load(reference) as model:
        return [logits(model, prompt) for prompt in asked]


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of two rows of logits, of the size of the second: square roots of sums of squares."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def main() -> int:
    """Check all models, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--longest", type=int, default=120, help="tokens of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS)
    options = parser.parse_args()
    rows = []
    print(f"seed {options.seed}")
    for artifact in sorted((options.pack / "models").glob("*.llmc")):
        row = check(artifact, options.seed, options.prompts, options.longest, options.tokens)
        rows.append(row)
        print(
            f"{row['model']:16} {row['kv']:5} logits {row['worst_logit']:.1e}  same tokens {row['agreeing']}/"
            f"{row['prompts']}  together {'same' if row['same_together'] else 'DIFFERENT'} (preempted "
            f"{'/'.join(map(str, row['preempted']))})  {row['seconds']:.1f} s  "
            + (f"off float32 by {row['off']:.1e}, CPU {row['off_cpu']:.1e}  " if "off" in row else "")
            + ("ok" if row["passed"] else "FAILED"),
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=1))
    return 0 if rows and all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
