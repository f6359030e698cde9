"""Every family of frontends/families/: a tiny random model of transformers, compiled from its folder with no spec.

With float32 weights its logits and greedy tokens are those of transformers, however the tokens are fed. What is here,
docs/families.md lists (docs/make_families_page.py).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

import llmc
from llmc.compiler.driver import compile_model
from llmc.frontends.hf_families import known_families, load_family
from llmc.runtime.engine import Feed
from llmc.runtime.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from family_cases import CASES, REMOTE, Remote
from reference import is_greedy, logits, saved_reference

PROMPT, ANSWER = 41, 32  # tokens; windows and original contexts of the cases are shorter than the prompt
TOLERANCE = 1e-4  # which tells gelu from its approximation
# Large enough that another one shows in the logits.
EPS = dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), 0.02)


def _steps(model: Model, ids: list[int], chunk: int) -> np.ndarray:
    """(n, V) logits of every place, fed `chunk` tokens a step."""
    sequence = model.engine.new_sequence()
    parts = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    rows = [model.engine.step([Feed(sequence, part, "all")]).logits.copy() for part in parts]
    model.engine.release(sequence)
    return np.concatenate(rows)


def _check(folder: Path, twin: PreTrainedModel, output: Path, seed: int) -> None:
    """The folder's model, compiled, gives what `twin` gives."""
    compile_model(folder, output, quant="f32")
    random = np.random.default_rng(seed)
    ids, other = (random.integers(3, 320, count).tolist() for count in (PROMPT, 7))
    with llmc.load(output) as model:
        made = model.generate(ids, max_tokens=ANSWER, ignore_eos=True)
        assert len(made.ids) == ANSWER
        text = [*ids, *made.ids]
        expected = logits(twin, text)
        assert is_greedy(expected, ids, list(made.ids))
        whole = _steps(model, text, len(text))
        np.testing.assert_allclose(whole, expected, atol=TOLERANCE, rtol=0)
        for chunk in (7, 1):
            np.testing.assert_array_equal(_steps(model, text, chunk), whole)
        batch = model.generate_batch([ids, other], max_tokens=ANSWER, ignore_eos=True)
        assert batch[0].ids == made.ids
        assert batch[1].ids == model.generate(other, max_tokens=ANSWER, ignore_eos=True).ids


def test_every_family_has_a_case() -> None:
    tested = {model_type for model_type, _ in CASES.values()} | {remote.model_type for remote in REMOTE.values()}
    decoders = [name for name in known_families() if load_family(name).settings.get("attention.causal", True)]
    assert sorted(tested) == decoders


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model_type, config = CASES[case]
    folder = tiny_model(model_type, seed=len(case), **EPS, **config)
    _check(folder, saved_reference(folder), tmp_path / "tiny.llmc", len(case))


@pytest.mark.parametrize("case", REMOTE)
def test_family_that_transformers_has_under_another_name(
    case: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    remote = REMOTE[case]
    twin = tiny_model(remote.twin[0], seed=len(case), **remote.twin[1])
    folder = tmp_path / "model"
    shutil.copytree(twin, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": remote.model_type, **remote.config}))
    (folder / "model.safetensors").unlink()
    save_file(_renamed(load_file(twin / "model.safetensors"), remote), folder / "model.safetensors")
    _check(folder, saved_reference(twin), tmp_path / "tiny.llmc", len(case))


def _renamed(weights: dict[str, np.ndarray], remote: Remote) -> dict[str, np.ndarray]:
    """The twin's tensors as the family's own code saves them."""
    found = dict(weights)
    for fused, modules in remote.fused.items():
        for name in [name for name in found if modules[0] in name]:
            parts = [found.pop(name.replace(modules[0], module)) for module in modules]
            if remote.grouped:
                groups = [part.reshape(remote.config["num_key_value_heads"], -1, *part.shape[1:]) for part in parts]
                whole = np.concatenate(groups, axis=1)
                found[name.replace(modules[0], fused)] = whole.reshape(-1, *whole.shape[2:])
            else:
                found[name.replace(modules[0], fused)] = np.concatenate(parts)
    for pattern, replacement in remote.names.items():
        found = {re.sub(pattern, replacement, name): values for name, values in found.items()}
    return found
