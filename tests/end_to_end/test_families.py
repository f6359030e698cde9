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
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from llmc.frontends.hf.families import known_families, load_family

sys.path.insert(0, str(Path(__file__).parent))
from family_cases import CASES, REMOTE, Remote
from family_check import EPS, check, variants
from family_lists.others import OTHERS
from reference import saved_reference

pytestmark = pytest.mark.usefixtures("plain_code")

_GATE, _DOWN = "shared_expert_gate.weight", "shared_expert.down_proj.weight"


def test_every_family_has_a_case() -> None:
    tested = {model_type for model_type, _ in CASES.values()} | {remote.model_type for remote in REMOTE.values()}
    families = {name: load_family(name) for name in known_families()}
    decoders = [
        name
        for name, family in families.items()
        if family.settings.get("attention.causal", True) and not family.encoder_layers
    ]
    assert sorted(tested) == decoders


def test_every_causal_model_of_transformers_is_accounted_for() -> None:
    known, there = set(known_families()), set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert there - known == set(OTHERS)


VARIANTS = variants({case: model_type for case, (model_type, _) in CASES.items()})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough_if(case=lambda case: case in VARIANTS)
def test_family(case: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model_type, config = CASES[case]
    folder = tiny_model(model_type, seed=len(case), **(EPS | config))
    # The eager Falcon takes the bias of ALiBi off twice, in the mask and beside it.
    reference = saved_reference(folder, "sdpa" if config.get("alibi") else "eager")
    check(folder, reference, tmp_path / "tiny.llmc", len(case))


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
    check(folder, _reference(twin, remote), tmp_path / "tiny.llmc", len(case))


def _reference(folder: Path, remote: Remote) -> PreTrainedModel:
    """The twin in `folder`, with what no config of its own says."""
    twin = saved_reference(folder)
    if remote.normalized:
        head = twin.get_output_embeddings().weight
        head.data = torch.nn.functional.normalize(head.data)
    if remote.alibi:
        _with_alibi(twin)
    if remote.ungated:
        for name, weight in twin.named_parameters():
            weight.data.mul_(0 if name.endswith(_GATE) else 1)
    return twin


def _with_alibi(twin: PreTrainedModel) -> None:
    """A model of transformers that has rope gets the bias of ALiBi in its stead, made as BLOOM makes it."""
    heads = twin.config.num_attention_heads

    def no_angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = (*position_ids.shape, twin.config.head_dim)
        return torch.ones(size), torch.zeros(size)

    def biased(module: torch.nn.Module, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> Any:
        count = args[0].shape[1]
        bias = build_alibi_tensor(torch.ones(1, count), heads, torch.float32).reshape(1, heads, 1, count)
        future = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)
        return args, {**kwargs, "attention_mask": bias + future}

    twin.model.rotary_emb.forward = no_angles
    twin.register_forward_pre_hook(biased, with_kwargs=True)


def _renamed(weights: dict[str, np.ndarray], remote: Remote) -> dict[str, np.ndarray]:
    """The twin's tensors as the family's own code saves them."""
    found = dict(weights)
    if remote.ungated:
        halves = {name: 0.5 * values for name, values in found.items() if name.endswith(_DOWN)}
        found = {name: values for name, values in (found | halves).items() if not name.endswith(_GATE)}
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
