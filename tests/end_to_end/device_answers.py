"""What the workers of some artifacts answer, one artifact after another in the same processes.

    mpirun -n 2 python tests/end_to_end/device_answers.py ASKED.json FOLDER
    python tests/end_to_end/device_answers.py ASKED.json FOLDER               artifacts of one device

ASKED.json: a list of {"artifact", "prompts": lists of ids, "new_tokens"}. FOLDER gets number.npz of each: `ids`
(prompts, new_tokens), greedy, all prompts in common steps; `logits_0`, ... (new_tokens, V): of one step that reads the
whole answer of a prompt at once.
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
    """Answer everything that is asked, in its order."""
    asked, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for number, each in enumerate(asked):
        if attend(each["artifact"], threads=1):
            continue
        with llmc.load(each["artifact"], threads=1, cache_tokens=CACHE_TOKENS) as model:
            np.savez(folder / f"{number}.npz", **answers(model, each["prompts"], each["new_tokens"]))


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
