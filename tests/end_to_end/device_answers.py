"""What the workers of an artifact answer.

    mpirun -n 2 python tests/end_to_end/device_answers.py ASKED.json ANSWERS.npz
    python tests/end_to_end/device_answers.py ASKED.json ANSWERS.npz               of an artifact of one device

ASKED.json: {"artifact", "prompts": lists of ids, "new_tokens"}. ANSWERS.npz gets `ids` (prompts, new_tokens), greedy,
all prompts in common steps; `logits_0`, ... (new_tokens, V): of one step that reads the whole answer of a prompt at
once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llmc
from llmc.runtime.model import Model
from llmc.runtime.runner import Feed
from llmc.runtime.workers.attend import attend

CACHE_TOKENS = 4096


def main() -> None:
    """Answer what is asked, or work for the rank that does."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    if attend(asked["artifact"], threads=1):
        return
    with llmc.load(asked["artifact"], threads=1, cache_tokens=CACHE_TOKENS) as model:
        np.savez(sys.argv[2], **answers(model, asked["prompts"], asked["new_tokens"]))


def answers(model: Model, prompts: list[list[int]], new_tokens: int) -> dict[str, NDArray[Any]]:
    """The arrays of a file."""
    made = model.generate_batch(prompts, max_tokens=new_tokens, ignore_eos=True)
    logits = [logits_of(model, prompt, list(each.ids)) for prompt, each in zip(prompts, made, strict=True)]
    found = {f"logits_{number}": rows for number, rows in enumerate(logits)}
    return {"ids": np.array([each.ids for each in made]), **found}


def logits_of(model: Model, prompt: list[int], answer: list[int]) -> NDArray[np.float32]:
    """(n, V): what the model says before each token of the answer."""
    runner, tokens = model.runner, model.manifest["tokens"]
    if model.manifest["task"] == "translate":
        source = runner.new_sequence()
        runner.encode([(source, prompt)])
        prompt = [tokens["start"], *tokens["forced"]]
    else:
        source = None
    text = runner.new_sequence(source)
    rows = runner.step([Feed(text, [*prompt, *answer[:-1]], "all")]).logits[len(prompt) - 1 :].copy()
    for each in (text, source):
        if each is not None:
            runner.release(each)
    return rows


if __name__ == "__main__":
    main()
