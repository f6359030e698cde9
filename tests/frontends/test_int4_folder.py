"""AWQ and GPTQ folders: what the model computes, and what open_model refuses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.compiler.errors import SourceError
from llmc.frontends.hf.quantization import packing_of
from llmc.frontends.quantized.words import WordPacking
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
from folders import edit, refusal, resave
from int4_layers import config_of, kept_as, quantize_folder
from meaning_logits import meaning_logits
from reference import logits, saved_reference

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def quantized(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A function `(kind, group) -> folder`; each is made once, and its "-float" twin beside it."""
    made: dict[tuple[str, int], Path] = {}

    def folder(kind: str, group: int) -> Path:
        if (kind, group) not in made:
            source = tiny_llama(hidden_size=128, intermediate_size=256)
            target = tmp_path_factory.mktemp("int4") / "model"
            made[kind, group] = quantize_folder(source, target, kind, group)
        return made[kind, group]

    return folder


@pytest.fixture
def awq(quantized: Callable[[str, int], Path], tmp_path: Path) -> Path:
    """A copy of a folder that a test may damage."""
    return Path(shutil.copytree(quantized("awq", 64), tmp_path / "model"))


@pytest.fixture
def gptq(quantized: Callable[[str, int], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantized("gptq", 32), tmp_path / "model"))


@pytest.mark.parametrize(
    ("kind", "group"), [("awq", 32), ("awq", 64), ("awq", 128), ("gptq", 32), ("gptq sym", 128), ("gptq_v2", -1)]
)
def test_logits_are_those_of_transformers(quantized: Callable[[str, int], Path], kind: str, group: int) -> None:
    """By Relax and the ops' NumPy meanings, on the weights as `dequantize` makes them of what is kept."""
    folder = quantized(kind, group)
    ids = np.random.default_rng(0).integers(3, 320, 20).tolist()
    with open_model(folder) as source:
        kept = {tensor.kept for tensor in source.tensors.values()}
        assert kept == {None, kept_as(kind, "int4_b32" if group == 32 else "int4_b64")}
        got = meaning_logits(source, ids)
    expected = logits(saved_reference(folder.with_name("model-float")), ids)
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


def test_shards_may_part_a_layer(awq: Path) -> None:
    tensors = load_file(awq / "model.safetensors")
    with open_model(awq) as source:
        expected = source.tensors["layers.0.q"].read()
    (awq / "model.safetensors").unlink()
    odd = {name: array for name, array in tensors.items() if name.endswith("scales")}
    save_file(odd, awq / "b.safetensors")
    save_file({name: array for name, array in tensors.items() if name not in odd}, awq / "a.safetensors")
    places = {name: "b.safetensors" if name in odd else "a.safetensors" for name in tensors}
    (awq / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    source = open_model(awq)
    q = source.tensors["layers.0.q"]
    np.testing.assert_array_equal(q.read(), expected)
    assert len(q.files) == 3
    source.close()
    assert all(file.data.closed for file in q.files)


def test_biases(awq: Path) -> None:
    """GPTQ's tools save zero biases for layers that have none; others are refused."""
    resave(awq, **{f"{Q}.bias": np.zeros(128, np.float16)})
    with open_model(awq) as source:
        assert "layers.0.q_bias" not in source.tensors
    resave(awq, **{f"{Q}.bias": np.full(128, 1, np.float16)})
    assert f"not read by any block {Q}.bias" in refusal(awq)


def test_a_given_spec(gptq: Path) -> None:
    with open_model(gptq) as source:
        spec = source.spec
        expected = source.tensors["layers.0.q"].read()
    edit(gptq / "config.json", model_type="nosuch")
    with open_model(gptq, spec) as source:
        np.testing.assert_array_equal(source.tensors["layers.0.q"].read(), expected)
    edit(gptq / "config.json", quantization_config={"quant_method": "hqq"})
    with pytest.raises(SourceError, match="quant_method is 'hqq', llmc keeps: awq, gptq"):
        open_model(gptq, spec)


# --- what is refused -----------------------------------------------------------------------------

AWQ, GPTQ = config_of("awq", 64), config_of("gptq", 32)
BAD_CONFIG: dict[str, tuple[Any, list[str]]] = {
    "text": ("awq", ["quantization_config = 'awq', wanted a table or null"]),
    "method": (AWQ | {"quant_method": "hqq"}, ["quant_method is 'hqq', llmc keeps: awq, gptq, "]),
    "method list": (AWQ | {"quant_method": ["awq"]}, ["quant_method is ['awq']"]),
    "none": ({"bits": 4, "group_size": 64}, ["quant_method is None"]),
    "bits": (AWQ | {"bits": 8}, ["quantization_config.bits = 8, llmc reads 4 with quant_method awq"]),
    "bits text": (GPTQ | {"bits": "4"}, ["bits = '4'"]),
    "bits float": (GPTQ | {"bits": 4.0}, ["bits = 4.0"]),
    "missing": ({"quant_method": "gptq"}, ["missing key bits; quantization_config: missing key group_size"]),
    "gemv": (AWQ | {"version": "gemv"}, ["version = 'gemv', llmc reads 'gemm'"]),
    "fast": (AWQ | {"version": "GEMV_FAST"}, ["version = 'GEMV_FAST'"]),
    "llm-awq": (AWQ | {"backend": "llm-awq"}, ["backend = 'llm-awq'"]),
    "marlin": (GPTQ | {"checkpoint_format": "gptq_marlin"}, ["checkpoint_format = 'gptq_marlin', llmc reads 'gptq'"]),
    "is marlin": (GPTQ | {"is_marlin_format": True}, ["is_marlin_format is set: llmc does not read Marlin"]),
    "formats": (GPTQ | {"format": "gptq", "checkpoint_format": "gptq_v2"}, ["checkpoint_format and format disagree"]),
    "format list": (GPTQ | {"format": [["gptq"]]}, ["format = [['gptq']]"]),
    "dynamic": (GPTQ | {"dynamic": {"+:x": {"bits": 8}}}, ["dynamic is set: llmc reads one packing"]),
    "words": (GPTQ | {"pack_dtype": "int64"}, ["pack_dtype = 'int64'"]),
    "group": (AWQ | {"group_size": 16}, ["group_size = 16, wanted a multiple of 32, or -1"]),
    "group 0": (AWQ | {"group_size": 0}, ["group_size = 0"]),
    "group huge": (AWQ | {"group_size": 32 << 60}, ["group_size = "]),
    "group bool": (AWQ | {"group_size": True}, ["group_size = True"]),
    "flag": (GPTQ | {"sym": 1}, ["sym = 1, llmc reads False, True"]),
    "several": (
        GPTQ | {"bits": 5, "group_sise": 32, "desc_act": None},
        ["bits = 5", "'group_sise' (near: group_size)"],
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config(awq: Path, case: str) -> None:
    table, messages = BAD_CONFIG[case]
    edit(awq / "config.json", quantization_config=table, hidden_size=0)
    message = refusal(awq)
    assert message.startswith("config.json: hidden_size = 0")  # the other faults are told with it
    for wanted in messages:
        assert wanted in message


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_either_name_of_the_format(key: str) -> None:
    faults: list[str] = []
    assert packing_of({"quantization_config": GPTQ | {key: "gptq_v2"}}, faults) == WordPacking("GPTQ", 4, 32)
    assert packing_of({"quantization_config": GPTQ | {key: "GPTQ"}}, faults) == WordPacking("GPTQ", 4, 32, 1)
    assert not faults


def test_config_and_tensors_disagree(awq: Path, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    edit(awq / "config.json", quantization_config=...)
    assert f"{Q.replace('0', '{0-1}')}.qweight" in refusal(awq)
    assert "are quantized, but config.json has no quantization_config" in refusal(awq)
    plain = Path(shutil.copytree(tiny_llama(), tmp_path / "plain"))
    edit(plain / "config.json", quantization_config=AWQ)
    assert "plain: quantized, but no tensor is called qweight" in refusal(plain)


BAD_PARTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": ({"qzeros": ..., "scales": ...}, [f"{Q}.weight: missing qzeros, scales"]),
    "stray": ({"qweight": ...}, [f"{Q}.weight: missing qweight"]),
    "twice": ({"weight": np.zeros((128, 128), np.float32)}, ["stored both as it is and quantized"]),
    "types": (
        {"qweight": np.zeros((16, 128), np.int64), "scales": np.zeros((4, 128), np.int32)},
        ["qweight is stored as I64, wanted I32", "scales is stored as I32, wanted F16 or BF16 or F32"],
    ),
    "flat": ({"qweight": np.zeros(2048, np.int32)}, ["qweight has shape [2048], wanted two sizes"]),
    "empty": ({"qweight": np.zeros((0, 128), np.int32)}, ["qweight has shape [0, 128]"]),
    "narrow": ({"qweight": np.zeros((16, 12), np.int32)}, ["12 rows of 128, wanted multiples of 8 and 32"]),
    "8 bits": ({"qweight": np.zeros((32, 128), np.int32)}, ["scales has shape [4, 128], wanted [8, 128]", "g_idx"]),
    "zeros": ({"qzeros": np.zeros((4, 128), np.int32)}, ["qzeros has shape [4, 128], wanted [4, 16] for 128 rows of"]),
    "act-order": (
        {"g_idx": np.arange(128, dtype=np.int32)[::-1] // 32},
        ["columns are grouped in the order of their activations (g_idx)", "desc_act false"],
    ),
    "g_idx": ({"g_idx": np.full(128, -1, np.int32)}, ["columns are grouped in the order"]),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts(gptq: Path, case: str) -> None:
    changes, messages = BAD_PARTS[case]
    parts = {f"{Q}.{part}": np.ascontiguousarray(a) if a is not ... else a for part, a in changes.items()}
    other = "model.layers.1.mlp.up_proj"
    resave(gptq, **parts, **{f"{other}.scales": ...})
    message = refusal(gptq)
    assert message.startswith("model: quantized tensors do not fit: ")
    assert f"{other}.weight: missing scales" in message
    for wanted in messages:
        assert wanted in message


def test_act_order_needs_its_order(gptq: Path) -> None:
    edit(gptq / "config.json", quantization_config=GPTQ | {"desc_act": True})
    open_model(gptq).close()
    resave(gptq, **{f"{Q}.g_idx": ...})
    assert f"{Q}.weight: missing g_idx" in refusal(gptq)
    edit(gptq / "config.json", quantization_config=GPTQ)
    open_model(gptq).close()


def test_awq_has_no_order(awq: Path) -> None:
    resave(awq, **{f"{Q}.g_idx": np.zeros(128, np.int32)})
    assert "g_idx, which AWQ does not have" in refusal(awq)


def test_a_layer_of_another_shape(awq: Path) -> None:
    edit(awq / "config.json", hidden_size=64, head_dim=32)
    assert "self_attn.q_proj.weight is [128, 128], wanted [128, 64]" in refusal(awq)
