"""What a compiled family must do: the logits and greedy tokens of transformers, however the tokens are fed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

import llmc
from llmc.compiler.driver import compile_model

sys.path.insert(0, str(Path(__file__).parent))
from feeding import all_logits
from reference import is_greedy, logits

PROMPT, ANSWER = 41, 32  # tokens; windows and original contexts of the cases are shorter than the prompt
TOLERANCE = 1e-4  # which tells gelu from its approximation
# Large enough that another one shows in the logits.
EPS = dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), 0.02)


def variants(kinds: Mapping[str, str]) -> set[str]:
    """Of case -> kind: the cases whose kind an earlier one has."""
    first: dict[str, str] = {}
    return {case for case, kind in kinds.items() if first.setdefault(kind, case) != case}


def check(path: Path, twin: PreTrainedModel, output: Path, seed: int) -> None:
    """The model at `path`, compiled to `output` with float32 weights, gives what `twin` gives."""
    compile_model(path, output, quant="f32")
    random = np.random.default_rng(seed)
    ids, other = (random.integers(3, 320, count).tolist() for count in (PROMPT, 7))
    with llmc.load(output) as model:
        made = model.generate(ids, max_tokens=ANSWER, ignore_eos=True)
        assert len(made.ids) == ANSWER
        text = [*ids, *made.ids]
        expected = logits(twin, text)
        assert is_greedy(expected, ids, list(made.ids))
        whole = all_logits(model, text, len(text))
        np.testing.assert_allclose(whole, expected, atol=TOLERANCE, rtol=0)
        for chunk in (7, 1):
            np.testing.assert_array_equal(all_logits(model, text, chunk), whole)
        batch = model.generate_batch([ids, other], max_tokens=ANSWER, ignore_eos=True)
        assert batch[0].ids == made.ids
        assert batch[1].ids == model.generate(other, max_tokens=ANSWER, ignore_eos=True).ids
