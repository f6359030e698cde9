"""Logits of a text, however many tokens a step is given."""

from __future__ import annotations

import numpy as np

from llmc.runtime.model import Model
from llmc.runtime.runner import Feed


def all_logits(model: Model, ids: list[int], chunk: int) -> np.ndarray:
    """(n, V) logits of every place, fed `chunk` tokens a step."""
    sequence = model.runner.new_sequence()
    parts = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    rows = [model.runner.step([Feed(sequence, part, "all")]).logits.copy() for part in parts]
    model.runner.release(sequence)
    return np.concatenate(rows)
