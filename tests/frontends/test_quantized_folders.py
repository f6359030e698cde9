"""Folders that other makers quantized: what the model computes is what their numbers say."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import llmc
from llmc.compiler.driver import compile_model
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from folders import edit, refusal
from meaning_logits import meaning_logits
from quantized_layers import (
    Packed,
    bnb_eight,
    bnb_four,
    compressed_bytes,
    compressed_fp4,
    compressed_ints,
    mlx_affine,
    mlx_floats,
    modelopt_floats,
    modelopt_fp4,
)
from quantized_reading import NEAR
from reference import is_greedy, logits, saved_reference

pytestmark = pytest.mark.usefixtures("plain_code")

Pack = Callable[[str, int, int, int], "Packed | None"]  # of a layer's name, its sizes and a seed; None: as it is


def _projection(pack: Callable[[int, int, int], Packed]) -> Pack:
    """Linear layers but the head, which is what these tools quantize."""
    return lambda layer, *sizes: pack(*sizes) if layer.endswith("_proj") else None


def _mlx(layer: str, rows: int, columns: int, seed: int) -> Packed:
    """What _MLX says: every matrix, embedding and head too."""
    if layer.endswith("v_proj"):
        return mlx_floats(rows, columns, "mxfp4", seed)
    bits = 6 if layer.endswith("down_proj") else 8 if layer == "model.embed_tokens" else 4
    return mlx_affine(rows, columns, bits, 64, seed, torch.bfloat16)


_MLX = {
    "group_size": 64, "bits": 4, "model.embed_tokens": {"group_size": 64, "bits": 8},
    **{f"model.layers.{i}.mlp.down_proj": {"group_size": 64, "bits": 6} for i in range(2)},
    **{f"model.layers.{i}.self_attn.v_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"} for i in range(2)},
}  # fmt: skip


def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "weights": {"symmetric": True, **weights}}
    table = {"quant_method": "compressed-tensors", "format": f"{format}-quantized", "config_groups": {"group_0": group}}
    return {"quantization_config": table | {"ignore": ["lm_head"], "quantization_status": "compressed"}}


def _modelopt(layer: str, rows: int, columns: int, seed: int) -> Packed | None:
    """What _MODELOPT says: attention in 8 bits, the rest but the head in 4."""
    if "self_attn" in layer:
        return modelopt_floats(rows, columns, (rows, columns), (), seed)
    return modelopt_fp4(rows, columns, "nvfp4", 0.5, seed) if layer.endswith("_proj") else None


_MODELOPT = {
    "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"],
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}},
    }
}  # fmt: skip
_BNB = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
_BNB8 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
# kind -> keys of config.json, how a layer is packed, and the formats that keep them
FOLDERS: dict[str, tuple[dict[str, Any], Pack, set[str]]] = {
    "mlx": ({"quantization": _MLX, "quantization_config": _MLX}, _mlx, {"q4_b64", "q6", "q8_b32", "mxfp4"}),
    "mlx plain": (
        {"quantization": {"bits": 4, "group_size": 64}},
        lambda _, rows, columns, seed: mlx_affine(rows, columns, 4, 64, seed), {"q4_b64"},
    ),
    "compressed ints": (
        _compressed("pack", num_bits=4, group_size=32),
        _projection(lambda rows, columns, seed: compressed_ints(rows, columns, 4, 32, seed=seed)), {"q4_0"},
    ),
    "compressed floats": (
        _compressed("float", num_bits=8, type="float", strategy="channel"),
        _projection(lambda rows, columns, seed: compressed_bytes(rows, columns, "float", (1, columns), seed=seed)),
        set(),
    ),
    "compressed nvfp4": (
        _compressed("nvfp4-pack", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        _projection(lambda rows, columns, seed: compressed_fp4(rows, columns, "nvfp4", 2.0, seed)), {"nvfp4"},
    ),
    "modelopt": (_MODELOPT, _modelopt, {"nvfp4"}),
    "bitsandbytes 4": (
        _BNB, _projection(lambda rows, columns, seed: bnb_four(rows, columns, "nf4", 64, 256, seed)), {"nf4"},
    ),
    "bitsandbytes 8": (_BNB8, _projection(bnb_eight), {"q8"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def quantized(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function `kind -> folder`; each is made once, and "float", the same numbers in float32, beside it."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            source = tiny_llama(hidden_size=128, intermediate_size=192)
            made[kind] = tmp_path_factory.mktemp("quantized") / "model"
            keys, pack, _ = FOLDERS[kind]
            save(source, made[kind], keys, *exchanged(load_file(source / "model.safetensors"), pack))
        return made[kind]

    return folder


Tensors = dict[str, torch.Tensor]


def exchanged(tensors: Mapping[str, torch.Tensor], pack: Pack) -> tuple[Tensors, Tensors]:
    """The tensors with packed matrices in place of some, and those with what these stand for."""
    packed, plain = {}, {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        layer = name.removesuffix(".weight")
        made = pack(layer, *tensor.shape, seed) if tensor.dim() == 2 else None
        packed |= {name: tensor} if made is None else made.named(layer)
        plain[name] = tensor if made is None else torch.from_numpy(made.values.astype(np.float32))
    return packed, plain


def save(source: Path, target: Path, keys: Mapping[str, Any], packed: Tensors, plain: Tensors) -> None:
    """A folder of the packed tensors, and "float" beside it of the plain ones."""
    for folder, tensors in ((target, packed), (target.with_name("float"), plain)):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(target / "config.json", **keys)


@pytest.mark.parametrize("kind", FOLDERS)
def test_logits_are_those_of_transformers(quantized: Callable[[str], Path], kind: str) -> None:
    folder = quantized(kind)
    ids = np.random.default_rng(0).integers(3, 320, 20).tolist()
    with open_model(folder) as source:
        assert {tensor.kept for tensor in source.tensors.values()} - {None} == FOLDERS[kind][2]
        got = meaning_logits(source, ids)
    expected = logits(saved_reference(folder.with_name("float")), ids)
    near = sum(NEAR.get(kept, 0) for kept in FOLDERS[kind][2])
    np.testing.assert_allclose(got, expected, atol=(1e-4 + 4 * near) * np.abs(expected).max())


@pytest.mark.parametrize(
    ("kind", "kept"), [("mlx plain", "q4_b64"), ("compressed nvfp4", "nvfp4"), ("bitsandbytes 4", "nf4")]
)
@pytest.mark.thorough_if(case=lambda kept: kept != "nf4")
def test_a_compiled_model_keeps_the_codes(
    quantized: Callable[[str], Path], kind: str, kept: str, tmp_path: Path
) -> None:
    """And of float32, where no activations are rounded, it answers as transformers does."""
    folder, prompt = quantized(kind), list(range(3, 30))
    result = compile_model(folder, tmp_path / "a.llmc")
    assert {format for name, format in result.formats.items() if name.startswith("layer") and "norm" not in name} == {
        kept
    }
    exact = compile_model(folder, tmp_path / "b.llmc", quant="f32")
    with llmc.load(exact.path) as model:
        made = model.generate(prompt, max_tokens=8, ignore_eos=True)
    assert is_greedy(logits(saved_reference(folder.with_name("float")), [*prompt, *made.ids]), prompt, list(made.ids))


def test_experts_of_mlx(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """In stacks, under other names than Mixtral's; the router has more bits."""
    source = tiny_model("mixtral", num_local_experts=4, intermediate_size=96)
    bits = {f"model.layers.{i}.block_sparse_moe.gate": {"bits": 8, "group_size": 32} for i in range(2)}
    packed, plain = exchanged(
        load_file(source / "model.safetensors"),
        lambda layer, rows, columns, seed: mlx_affine(rows, columns, 8 if layer in bits else 4, 32, seed),
    )
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for layer in range(2):
        for theirs, stacked in names.items():
            for part in ("weight", "scales", "biases"):
                stem = f"model.layers.{layer}.block_sparse_moe"
                parts = [packed.pop(f"{stem}.experts.{expert}.{theirs}.{part}") for expert in range(4)]
                packed[f"{stem}.switch_mlp.{stacked}.{part}"] = torch.stack(parts)
    save(source, tmp_path / "model", {"quantization": {"bits": 4, "group_size": 32, **bits}}, packed, plain)
    with open_model(tmp_path / "model") as found, open_model(tmp_path / "float") as expected:
        assert set(found.tensors) == set(expected.tensors)
        for name, tensor in expected.tensors.items():
            np.testing.assert_array_equal(found.tensors[name].read(), tensor.read(), err_msg=name)
        assert {tensor.kept for name, tensor in found.tensors.items() if ".experts." in name} == {"q4"}


def test_what_config_json_does_not_tell_of(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """Without its table a folder is refused, by the names of its tensors."""
    for kind, name in (("mlx", "scales"), ("compressed ints", "weight_packed"), ("bitsandbytes 4", "weight.absmax")):
        folder = Path(shutil.copytree(quantized(kind), tmp_path / kind))
        edit(folder / "config.json", quantization=..., quantization_config=...)
        message = refusal(folder)
        assert f"model.layers.{{0-1}}.self_attn.q_proj.{name}" in message


def test_a_file_of_its_own_for_what_is_quantized(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """Older exports of Model Optimizer have one, and nothing in config.json."""
    folder = Path(shutil.copytree(quantized("modelopt"), tmp_path / "model"))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    edit(folder / "config.json", quantization_config=...)
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with open_model(folder) as source:
        assert {tensor.kept for tensor in source.tensors.values()} - {None} == {"nvfp4"}
    for text, message in (("[]", "hf_quant_config.json"), ('{"quantization": 3}', "quantization = 3, wanted a table")):
        (folder / "hf_quant_config.json").write_text(text)
        assert message in refusal(folder)
