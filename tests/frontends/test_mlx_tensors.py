"""Matrices as MLX quantizes them: the values are the definition's, codes are kept where a format has as many bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SourceError
from llmc.frontends.hf.quantization import packing_of
from llmc.frontends.quantized import grouped
from llmc.frontends.quantized.mlx import MlxLayer, MlxPacking

sys.path.insert(0, str(Path(__file__).parent))
from quantized_layers import Packed, mlx_affine, mlx_floats
from quantized_reading import check, faults_of, fold, refusal

# bits, columns, columns of a scale -> the format that has such codes
KEPT = {
    (2, 96, 32): "q2", (2, 128, 128): "q2", (3, 96, 32): "q3", (3, 128, 64): "q3", (4, 96, 32): "q4",
    (4, 128, 64): "q4_b64", (4, 256, 128): "q4_b64", (5, 96, 32): "q5_1", (5, 192, 64): "q5", (6, 128, 64): "q6",
    (6, 96, 32): None, (8, 96, 32): "q8_b32", (8, 128, 128): "q8_b32",
}  # fmt: skip


def config(bits: int = 4, group: int = 64, **more: Any) -> dict[str, Any]:
    table = {"group_size": group, "bits": bits, **more}
    return {"quantization": table, "quantization_config": table}


@pytest.mark.parametrize(("case", "kept"), KEPT.items())
def test_affine(case: tuple[int, int, int], kept: str | None, tmp_path: Path) -> None:
    bits, columns, group = case
    packed = mlx_affine(19, columns, bits, group)
    tensors = fold(tmp_path / "t", config(bits, group), packed.named("a") | {"norm.weight": torch.ones(3)})
    assert set(tensors) == {"a.weight", "norm.weight"}
    assert tensors["a.weight"].stored == f"MLX{bits}"
    assert tensors["a.weight"].nbytes == sum(tensor.nbytes for tensor in packed.tensors.values())
    check(tensors["a.weight"], packed.values, kept)


@settings(deadline=None, max_examples=25)
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    group=st.sampled_from([32, 64, 128]),
    rows=st.integers(1, 40),
    groups=st.integers(1, 3),
    chunk=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
)
def test_pieces_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, bits: int, group: int, rows: int, groups: int, chunk: int, seed: int
) -> None:
    packed = mlx_affine(rows, group * groups, bits, group, seed)
    tensor = fold(tmp_path_factory.mktemp("t") / "t", config(bits, group), packed.named("a"))["a.weight"]
    widest = {2: "q2", 3: "q3", 4: "q4_b64", 5: "q5", 6: "q6", 8: "q8_b32"}
    narrow = widest | {4: "q4", 5: "q5_1", 6: None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "CHUNK", chunk)
        check(tensor, packed.values, (narrow if group == 32 else widest)[bits])


def test_scales_of_other_types(tmp_path: Path) -> None:
    """bfloat16 as most models have it; float32 that float16 has not nearly is read, not kept."""
    packed = mlx_affine(8, 64, 4, 64, dtype=torch.bfloat16)
    check(fold(tmp_path / "t", config(), packed.named("a"))["a.weight"], packed.values, "q4_b64")
    parts = packed.named("a")
    parts |= {name: parts[name].float() * 2.0**-20 for name in ("a.scales", "a.biases")}
    small = fold(tmp_path / "u", config(), parts)["a.weight"]
    values = packed.values * 2.0**-20
    assert abs(small.read() - values).max() <= 2.0**-22 * abs(values).max()
    with pytest.raises(SourceError, match="a.weight has scales that float16 cannot hold"):
        small.read_quantized()


@pytest.mark.parametrize(("mode", "kept"), [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8", None)])
@pytest.mark.parametrize("columns", [32, 96, 128])
def test_floats(mode: str, kept: str | None, columns: int, tmp_path: Path) -> None:
    """What stands beside the mode is not read: it has one size."""
    packed = mlx_floats(7, columns, mode)
    tensor = fold(tmp_path / "t", config(4, 32, mode=mode), packed.named("a"))["a.weight"]
    assert tensor.stored == {"mxfp8": "FP8"}.get(mode, mode.upper())
    check(tensor, packed.values, kept)


def test_mixed_by_layer(tmp_path: Path) -> None:
    own: dict[str, Packed] = {
        "usual": mlx_affine(4, 64, 4, 64), "said": mlx_affine(4, 64, 4, 64, 1), "more": mlx_affine(4, 64, 6, 64),
        "narrow": mlx_affine(4, 64, 4, 32), "fours": mlx_floats(4, 64, "mxfp4"), "eights": mlx_affine(4, 64, 8, 64),
    }  # fmt: skip
    table = config(
        said=True, plain=False, more={"bits": 6}, narrow={"group_size": 32}, fours={"mode": "mxfp4"},
        eights={"bits": 8, "group_size": 64, "mode": "affine"},
    )  # fmt: skip
    tensors = {"plain.weight": torch.ones(2, 2)}
    for layer, packed in own.items():
        tensors |= packed.named(layer)
    found = fold(tmp_path / "t", table, tensors)
    assert set(found) == {f"{layer}.weight" for layer in (*own, "plain")}
    assert found["plain.weight"].read().tolist() == [[1, 1], [1, 1]]
    kept = {"more": "q6", "narrow": "q4", "fours": "mxfp4", "eights": "q8_b32"}
    for layer, packed in own.items():
        check(found[f"{layer}.weight"], packed.values, kept.get(layer, "q4_b64"))


STACKS = {
    "m.mlp.switch_mlp.up_proj": "m.mlp.experts.{}.up_proj.weight",
    "m.block_sparse_moe.switch_mlp.gate_proj": "m.block_sparse_moe.experts.{}.w1.weight",
    "m.block_sparse_moe.switch_mlp.down_proj": "m.block_sparse_moe.experts.{}.w2.weight",
    "m.block_sparse_moe.switch_mlp.up_proj": "m.block_sparse_moe.experts.{}.w3.weight",
    "m.mlp.experts.up_proj": "m.mlp.experts.{}.up_proj.weight",
}


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("stack", STACKS)
def test_stacks_of_experts(stack: str, mode: str, tmp_path: Path) -> None:
    """And one of floats, too narrow to be quantized, a file may have beside them."""
    experts = [mlx_affine(5, 64, 3, 64, i) if mode == "affine" else mlx_floats(5, 64, mode, i) for i in range(3)]
    parts = {part: torch.stack([one.tensors[part] for one in experts]) for part in experts[0].tensors}
    narrow = torch.randn(3, 4, 5)
    tensors = Packed(parts, experts[0].values).named(stack) | {"n.mlp.switch_mlp.up_proj.weight": narrow}
    found = fold(tmp_path / "t", config(3, 64, mode=mode), tensors)
    kept = {"affine": "q3", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}.get(mode)
    for number, expert in enumerate(experts):
        check(found.pop(STACKS[stack].format(number)), expert.values, kept)
    plain = [found.pop(f"n.mlp.experts.{number}.up_proj.weight").read() for number in range(3)]
    torch.testing.assert_close(torch.from_numpy(plain[1]), narrow[1])
    assert not found


# --- what is refused -----------------------------------------------------------------------------

ONE = mlx_affine(4, 64, 4, 64).tensors
FOURS = mlx_floats(4, 64, "mxfp4").tensors
BAD_PARTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no scales": ({}, {"scales": ...}, "a.weight: missing scales"),
    "no weight": ({}, {"weight": ...}, "a.weight: missing weight"),
    "no biases": ({}, {"biases": ...}, "a.weight: missing biases"),
    "signed": ({}, {"weight": ONE["weight"].view(torch.int32)}, "weight is stored as I32, wanted U32"),
    "scales": ({}, {"scales": torch.ones(4, 1).int()}, "scales is stored as I32, wanted F16 or BF16 or F32"),
    "flat": ({}, {"weight": ONE["weight"].reshape(-1)}, "weight has shape [32], wanted two sizes, or three"),
    "empty": ({}, {"weight": ONE["weight"][:0]}, "weight has shape [0, 8]"),
    "stack": ({}, {"weight": ONE["weight"][None]}, "knows stacks of experts by switch_mlp or experts in their name"),
    "scalar": ({}, {"scales": torch.tensor(1.0)}, "scales has shape [], wanted [4, 1] for rows of 64, 4 bits"),
    "wide": ({}, {"biases": torch.ones(4, 2).half()}, "biases has shape [4, 2], wanted [4, 1]"),
    "rows": ({}, {"scales": torch.ones(3, 1).half()}, "scales has shape [3, 1], wanted [4, 1]"),
    "bits": ({"bits": 8}, {}, "8 words a row are not of groups of 64 codes of 8 bits"),
    "odd": ({"bits": 3}, {}, "8 words a row are not of groups of 64 codes of 3 bits"),
    "mode": ({"mode": "mxfp4"}, {}, "biases, which mxfp4 does not have"),
    "floats": ({"mode": "mxfp4"}, {**FOURS, "scales": FOURS["scales"].float(), "biases": ...}, "stored as F32, wanted"),
    "nv": ({"mode": "nvfp4"}, {**FOURS, "biases": ...}, "scales has shape [4, 2], wanted [4, 4]"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts(case: str, tmp_path: Path) -> None:
    """Each is told with what is wrong elsewhere."""
    keys, changes, message = BAD_PARTS[case]
    tensors = Packed(ONE | changes, ONE["weight"].numpy()).named("a") | {"b.scales": torch.ones(2)}
    found = refusal(tmp_path / "t", config(**keys), tensors)
    assert found.startswith("x: quantized tensors do not fit: ")
    assert "a.weight" in found
    assert message in found
    assert "b.weight: missing weight" in found or message.startswith("a.weight: missing weight")


def test_a_matrix_in_two_forms(tmp_path: Path) -> None:
    stack = {f"m.mlp.switch_mlp.up_proj.{part}": tensor[None] for part, tensor in ONE.items()}
    message = refusal(tmp_path / "t", config(), stack | {"m.mlp.experts.0.up_proj.weight": torch.ones(4, 64)})
    assert "m.mlp.experts.0.up_proj.weight: stored twice" in message


def test_no_part_at_all(tmp_path: Path) -> None:
    assert "quantized by MLX, but no tensor is called scales" in refusal(
        tmp_path / "t", config(), {"a.weight": torch.ones(2, 2)}
    )


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number(part: str, bad: float, tmp_path: Path) -> None:
    parts = mlx_affine(4, 64, 4, 64).named("a")
    parts[f"a.{part}"][2, 0] = bad
    tensor = fold(tmp_path / "t", config(), parts)["a.weight"]
    for read in (tensor.read, tensor.read_quantized):
        with pytest.raises(SourceError, match="a.weight has NaN or infinite values"):
            read()


def test_scales_of_bytes_that_are_no_number(tmp_path: Path) -> None:
    for mode, bad in (("mxfp4", 255), ("nvfp4", 127), ("mxfp8", 255)):
        parts = mlx_floats(4, 64, mode).named("a")
        parts["a.scales"][2, 0] = bad
        tensor = fold(tmp_path / mode, config(mode=mode), parts)["a.weight"]
        with pytest.raises(SourceError, match="a.weight has NaN or infinite values"):
            tensor.read()


HUGE = 10**400
BAD_CONFIG: dict[str, tuple[Any, str]] = {
    "list": ([4], "quantization = [4], wanted MLX's table"),
    "null": (None, "quantization = None, wanted MLX's table"),
    "bits": ({"bits": 7}, "quantization: 7 bits in groups of 64, wanted 2, 3, 4, 5, 6, 8 in groups of 32, 64, 128"),
    "no bits": ({"bits": 0}, "quantization: 0 bits"),
    "float bits": ({"bits": 4.0}, "quantization: 4.0 bits"),
    "bool bits": ({"bits": False}, "quantization: False bits"),
    "nan bits": ({"bits": float("nan")}, "quantization: nan bits"),
    "many bits": ({"bits": HUGE}, "quantization: 1000"),
    "list bits": ({"bits": [4]}, "quantization: [4] bits"),
    "group": ({"group_size": 16}, "4 bits in groups of 16"),
    "table group": ({"group_size": {}}, "4 bits in groups of {}"),
    "mode": ({"mode": "mxfp6"}, "quantization.mode = 'mxfp6', llmc reads affine, mxfp4, nvfp4, mxfp8"),
    "list mode": ({"mode": ["affine"]}, "quantization.mode = ['affine']"),
    "no mode": ({"mode": ""}, "quantization.mode = ''"),
    "method": ({"quant_method": "x"}, "quantization.'quant_method' = 'x', wanted true, false or a table"),
    "layer": ({"a.b": {"bits": 4, "axis": 1}}, "quantization.'a.b' = {'axis': 1, 'bits': 4}, wanted true"),
    "layer bits": ({"a\nb": {"bits": 1}}, "quantization.'a\\nb': 1 bits"),
    "number": ({"a": 1}, "quantization.'a' = 1, wanted true"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config(case: str) -> None:
    table, message = BAD_CONFIG[case]
    assert message in faults_of({"quantization": table})


def test_two_tables_that_disagree() -> None:
    other = {"quantization": {"bits": 4}, "quantization_config": {"bits": 8}}
    assert "quantization and quantization_config disagree" in faults_of(other)


@pytest.mark.parametrize(
    ("table", "usual"),
    [
        ({}, MlxLayer(4, 64)),
        ({"bits": None, "group_size": None, "mode": None}, MlxLayer(4, 64)),
        ({"bits": 3, "group_size": 128}, MlxLayer(3, 128)),
        ({"mode": "nvfp4", "bits": 8, "group_size": 64}, MlxLayer(4, 16, "nvfp4")),
    ],
)
@pytest.mark.parametrize("copy", [lambda table: table, lambda table: None, lambda table: json.loads(json.dumps(table))])
def test_what_config_json_may_say(table: dict[str, Any], usual: MlxLayer, copy: Callable[[Any], Any]) -> None:
    faults: list[str] = []
    assert packing_of({"quantization": table, "quantization_config": copy(table)}, faults) == MlxPacking(usual, {})
    assert not faults
