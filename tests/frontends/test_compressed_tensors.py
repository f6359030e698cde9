"""Matrices as compressed-tensors packs them: the values, the codes that are kept, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SourceError
from llmc.frontends.hf.quantization import packing_of
from llmc.frontends.quantized.compressed import WHOLE, CompressedPacking, Scheme

sys.path.insert(0, str(Path(__file__).parent))
from quantized_layers import Packed, compressed_bytes, compressed_fp4, compressed_ints
from quantized_reading import check, faults_of, fold, refusal

INTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel"}


def config(format: str, *weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": own} for i, own in enumerate(weights)}
    table = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    return {"quantization_config": table | more}


def ints(bits: int, group: int | None, zeros: bool = False) -> dict[str, Any]:
    """The table for such a matrix; `group` as in compressed_ints."""
    strategy = {None: "tensor", -1: "channel"}.get(group, "group")
    said = {} if group is None else {"group_size": group}
    return INTS | {"group_size": None, "num_bits": bits, "strategy": strategy, "symmetric": not zeros} | said


# bits -> the formats for symmetric codes and blocks of 64 and of 32, and for zeros of their own
KEPT: dict[int, tuple[str | None, str | None, str | None, str | None]] = {
    1: (None, None, None, None), 2: ("q2", "q2", None, None), 3: ("q3", "q3", None, None),
    4: ("q4_0_b64", "q4_0", "int4_b64", "int4_b32"), 5: ("q5_0", "q5_0", None, None), 6: ("q6", None, None, None),
    7: (None, None, None, None), 8: ("q8", "q8", None, None),
}  # fmt: skip


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("columns", "group"), [(128, 64), (96, 32), (192, -1), (64, None)])
@pytest.mark.parametrize("bits", KEPT)
def test_packed_ints(bits: int, columns: int, group: int | None, zeros: bool, tmp_path: Path) -> None:
    packed = compressed_ints(13, columns, bits, group, zeros)
    tensors = packed.named("a") | {"norm.weight": torch.ones(3)}
    found = fold(tmp_path / "t", config("pack-quantized", ints(bits, group, zeros)), tensors)
    assert set(found) == {"a.weight", "norm.weight"}
    assert found["a.weight"].stored == f"INT{bits}"
    check(found["a.weight"], packed.values, KEPT[bits][2 * zeros + (group == 32)])


@settings(deadline=None, max_examples=25)
@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    group=st.sampled_from([None, -1, 16, 32, 48, 64]),
    zeros=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    tmp_path_factory: pytest.TempPathFactory,
    bits: int, rows: int, columns: int, group: int | None, zeros: bool, seed: int,
) -> None:  # fmt: skip
    """Rows may end within a word, and within a group; then no format keeps them."""
    packed = compressed_ints(rows, columns, bits, group, zeros, seed)
    table = config("pack-quantized", ints(bits, group, zeros))
    tensor = fold(tmp_path_factory.mktemp("t") / "t", table, packed.named("a"))["a.weight"]
    wide = columns if group in (None, -1) else group
    narrow = columns % 64 > 0 or wide % 64 > 0
    check(tensor, packed.values, None if columns % 32 or wide % 32 else KEPT[bits][2 * zeros + narrow])


def test_a_scale_without_a_shape(tmp_path: Path) -> None:
    """That of a whole matrix is [1] or []."""
    packed = compressed_ints(5, 64, 4, None)
    parts = packed.named("a") | {"a.weight_scale": packed.tensors["weight_scale"].reshape(())}
    check(fold(tmp_path / "t", config("pack-quantized", ints(4, None)), parts)["a.weight"], packed.values, "q4_0_b64")


def test_an_order_that_is_none(tmp_path: Path) -> None:
    packed = compressed_ints(5, 96, 4, 32)
    parts = packed.named("a") | {"a.weight_g_idx": torch.arange(96, dtype=torch.int32) // 32}
    table = config("pack-quantized", INTS | {"actorder": "group"})
    check(fold(tmp_path / "t", table, parts)["a.weight"], packed.values, "q4_0")


@pytest.mark.parametrize(
    ("kind", "weights", "sides", "shape", "kept"),
    [
        ("int", {"strategy": "channel"}, (1, 96), (), "q8"),
        ("int", {"strategy": "tensor"}, (9, 96), (1,), "q8"),
        ("int", {"strategy": "group", "group_size": 32}, (1, 32), (), "q8"),
        ("int", {"strategy": "group", "group_size": 24}, (1, 24), (), None),
        ("float", {"strategy": "tensor"}, (9, 96), (), None),
        ("float", {"strategy": "tensor"}, (9, 96), (1,), None),
        ("float", {"strategy": "channel"}, (1, 96), (), None),
        ("float", {"strategy": "block", "block_structure": [4, 64]}, (4, 64), (), None),
    ],
)
def test_codes_of_a_byte(
    kind: str, weights: dict[str, Any], sides: tuple[int, int], shape: tuple[int, ...], kept: str | None, tmp_path: Path
) -> None:
    """Under the format's own name, and as "naive-quantized" of older tools."""
    packed = compressed_bytes(9, 96, kind, sides, shape)
    for format in (f"{kind}-quantized", "naive-quantized"):
        table = config(format, {"num_bits": 8, "type": kind} | weights)
        found = fold(tmp_path / format, table, packed.named("a"))
        assert found["a.weight"].stored == {"int": "INT8", "float": "FP8"}[kind]
        check(found["a.weight"], packed.values, kept)


def test_float_of_a_shapeless_scale(tmp_path: Path) -> None:
    packed = compressed_bytes(9, 96, "float", (9, 96))
    parts = packed.named("a") | {"a.weight_scale": packed.tensors["weight_scale"].reshape(())}
    found = fold(tmp_path / "t", config("float-quantized", FLOATS | {"strategy": "tensor"}), parts)
    check(found["a.weight"], packed.values, None)


FOURS = {
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


@pytest.mark.parametrize(("kind", "kept"), [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")])
@pytest.mark.parametrize("columns", [32, 160])
def test_four_bit_floats(kind: str, kept: str | None, columns: int, tmp_path: Path) -> None:
    packed = compressed_fp4(7, columns, kind, 0.25 if kind == "nvfp4" else 1.0)
    found = fold(tmp_path / "t", config(f"{kind}-pack-quantized", FOURS[kind]), packed.named("a"))
    assert found["a.weight"].stored == kind.upper()
    check(found["a.weight"], packed.values, kept)


def test_a_divisor_of_all_scales(tmp_path: Path) -> None:
    """Three roundings: of what is one over it, of scales, of values."""
    packed = compressed_fp4(7, 64, "nvfp4", 1234.567)
    tensor = fold(tmp_path / "t", config("nvfp4-pack-quantized", FOURS["nvfp4"]), packed.named("a"))["a.weight"]
    np.testing.assert_allclose(tensor.read(), packed.values, rtol=2.0**-22)


def test_layers_of_several_groups_and_what_is_of_activations(tmp_path: Path) -> None:
    """Which group a layer is of, its tensors tell; scales of activations and of the cache are left out."""
    own: dict[str, tuple[Packed, str | None]] = {
        "fours": (compressed_ints(6, 64, 4, 32), "q4_0"), "eights": (compressed_ints(6, 64, 8, -1), "q8"),
        "uneven": (compressed_ints(6, 64, 4, 32, zeros=True), "int4_b32"),
    }  # fmt: skip
    tensors = {"a.input_scale": torch.ones(1), "a.k_scale": torch.ones(1), "plain.weight": torch.ones(2, 2)}
    for layer, (packed, _) in own.items():
        tensors |= packed.named(layer)
    table = config(
        "pack-quantized", ints(8, -1), ints(4, 32), ints(4, 32, zeros=True), ignore=["plain"], version="0.1",
        kv_cache_scheme={"num_bits": 8}, quantization_status="compressed", sparsity_config={"format": "dense"},
    )  # fmt: skip
    for group in table["quantization_config"]["config_groups"].values():
        group["input_activations"] = {"num_bits": 8, "dynamic": True}
    found = fold(tmp_path / "t", table, tensors)
    assert set(found) == {f"{layer}.weight" for layer in (*own, "plain")}
    for layer, (packed, kept) in own.items():
        check(found[f"{layer}.weight"], packed.values, kept)


def test_groups_of_two_formats(tmp_path: Path) -> None:
    packed, wide = compressed_ints(6, 64, 4, 32), compressed_bytes(6, 64, "float", (1, 64))
    table = config("mixed-precision", INTS, FLOATS)
    groups = table["quantization_config"]["config_groups"]
    groups["group_0"]["format"], groups["group_1"]["format"] = "pack-quantized", "float-quantized"
    found = fold(tmp_path / "t", table, packed.named("a") | wide.named("b"))
    check(found["a.weight"], packed.values, "q4_0")
    check(found["b.weight"], wide.values, None)


# --- what is refused -----------------------------------------------------------------------------

FOUR, UNEVEN = compressed_ints(6, 96, 4, 32).tensors, compressed_ints(6, 96, 4, 32, zeros=True).tensors
SHAPE = "weight_shape"
MX, NV = compressed_fp4(6, 96, "mxfp4").tensors, compressed_fp4(6, 96, "nvfp4").tensors
BYTES = compressed_bytes(6, 96, "float", (1, 96)).tensors
SIGNED = compressed_bytes(6, 96, "int", (1, 96)).tensors
_NO = {part: ... for part in FOUR}
BAD_PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no scale": ("pack", INTS, {"weight_scale": ...}, "missing weight_scale, for pack-quantized of 4 bits, scales for"),
    "no shape": ("pack", INTS, {SHAPE: ...}, "missing weight_shape"),
    "no codes": ("pack", INTS, {"weight_packed": ...}, "missing weight_packed"),
    "both": ("pack", INTS, {"weight": torch.ones(6, 96)}, "weight not expected"),
    "zeros": ("pack", INTS, UNEVEN, "weight_zero_point not expected"),
    "no zeros": ("pack", ints(4, 32, zeros=True), {}, "weight_zero_point missing"),
    "zeros' shape": ("pack", ints(4, 32, zeros=True), UNEVEN | {"weight_zero_point": torch.zeros(6, 3).int()},
                     "weight_zero_point has shape [6, 3], wanted [1, 3]"),
    "zeros' type": ("pack", ints(4, 32, zeros=True), UNEVEN | {"weight_zero_point": torch.zeros(1, 3)},
                    "weight_zero_point is stored as F32, wanted I32"),
    "types": ("pack", INTS, {"weight_packed": FOUR["weight_packed"].long()}, "weight_packed is stored as I64"),
    "scales' type": ("pack", INTS, {"weight_scale": torch.ones(6, 3).int()}, "weight_scale is stored as I32, wanted"),
    "scales": ("pack", INTS, {"weight_scale": torch.ones(6, 2)}, "weight_scale has shape [6, 2], wanted [6, 3]"),
    "flat": ("pack", INTS, {"weight_packed": FOUR["weight_packed"].reshape(-1)}, "has shape [72], wanted a matrix"),
    "sizes": ("pack", INTS, {SHAPE: torch.tensor([6, 96, 1])}, "weight_shape has shape [3], wanted [2]"),
    "size": ("pack", INTS, {SHAPE: torch.tensor(96)}, "weight_shape has shape [], wanted [2]"),
    "wide": ("pack", INTS, {SHAPE: torch.tensor([6, 104])}, "weight_packed has shape [6, 12], wanted [6, 13]"),
    "huge": ("pack", INTS, {SHAPE: torch.tensor([1 << 62, 1 << 62])}, "weight_packed has shape [6, 12], wanted ["),
    "negative": ("pack", INTS, {SHAPE: torch.tensor([6, -3]), "weight_packed": torch.zeros(6, 0).int(),
                                "weight_scale": torch.zeros(6, 0)}, "a matrix of shape [6, -3]"),
    "none": ("pack", INTS, {SHAPE: torch.tensor([6, 0]), "weight_packed": torch.zeros(6, 0).int(),
                            "weight_scale": torch.zeros(6, 0)}, "a matrix of shape [6, 0]"),
    "bits": ("pack", ints(8, 32), {}, "weight_packed has shape [6, 12], wanted [6, 24] for [6, 96]"),
    "order": ("pack", INTS, {"weight_g_idx": torch.arange(95, -1, -1).int() // 32}, "in the order of their activation"),
    "order's size": ("pack", INTS, {"weight_g_idx": torch.zeros(3).int()}, "in the order of their activation"),
    "global": ("pack", INTS, {"weight_global_scale": torch.ones(1)}, "weight_global_scale not expected"),
    "int type": ("int", {"strategy": "channel"}, _NO | SIGNED | {"weight": SIGNED["weight"].view(torch.uint8)},
                 "weight is stored as U8, wanted I8"),
    "int zeros": ("int", {"strategy": "channel"}, _NO | SIGNED | {"weight_zero_point": torch.zeros(6, 1).char()},
                  "weight_zero_point not expected"),
    "int scales": ("int", {"strategy": "channel"}, _NO | SIGNED | {"weight_scale": torch.ones(6)},
                   "weight_scale has shape [6], wanted [6, 1] for [6, 96]"),
    "float type": ("float", FLOATS, _NO | BYTES | {"weight": torch.ones(6, 96)}, "stored as F32, wanted F8_E4M3"),
    "float blocks": ("float", FLOATS | {"strategy": "block", "block_structure": [4, 64]}, _NO | BYTES,
                     "weight_scale has shape [6, 1], wanted [2, 2] for [6, 96]"),
    "mxfp4 scales": ("mxfp4-pack", FOURS["mxfp4"], _NO | MX | {"weight_scale": MX["weight_scale"].float()},
                     "weight_scale is stored as F32, wanted U8"),
    "mxfp4 width": ("mxfp4-pack", FOURS["mxfp4"], _NO | MX | {"weight_packed": MX["weight_packed"][:, :40]},
                    "rows of 80, wanted a multiple of 32"),
    "no divisor": ("nvfp4-pack", FOURS["nvfp4"], _NO | NV | {"weight_global_scale": ...}, "missing weight_global"),
    "divisors": ("nvfp4-pack", FOURS["nvfp4"], _NO | NV | {"weight_global_scale": torch.ones(6)},
                 "weight_global_scale has shape [6], wanted [1]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts(case: str, tmp_path: Path) -> None:
    """Each is told with what is wrong elsewhere."""
    format, weights, changes, message = BAD_PARTS[case]
    tensors = Packed(FOUR | changes, np.zeros(0)).named("a") | {"b.weight_scale": torch.ones(2)}
    table = config(f"{format}-quantized", {"num_bits": 8, "type": "int"} | weights)
    found = refusal(tmp_path / "t", table, tensors)
    assert found.startswith("x: quantized tensors do not fit: ")
    assert "a.weight" in found
    assert message in found
    assert "b.weight: missing weight" in found or "a.weight, b.weight: missing weight" in found


def test_no_part_at_all(tmp_path: Path) -> None:
    assert "quantized by compressed-tensors, but no tensor is" in refusal(
        tmp_path / "t", config("pack-quantized", INTS), {"a.weight": torch.ones(2, 2)}
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number(bad: float, tmp_path: Path) -> None:
    cases = (
        ("pack", INTS, compressed_ints(6, 64, 4, 32)),
        ("pack", ints(4, None), compressed_ints(6, 64, 4, None)),
        ("int", FLOATS | {"type": "int"}, compressed_bytes(6, 64, "int", (1, 64))),
        ("float", FLOATS, compressed_bytes(6, 64, "float", (1, 64))),
    )
    for number, (format, weights, packed) in enumerate(cases):
        packed.tensors["weight_scale"].view(-1)[-1] = bad
        tensor = fold(tmp_path / str(number), config(f"{format}-quantized", weights), packed.named("a"))["a.weight"]
        for read in (tensor.read, tensor.read_quantized) if tensor.kept else (tensor.read,):
            with pytest.raises(SourceError, match=r"a.weight(_scale)? has NaN or infinite values"):
                read()


def test_numbers_that_are_too_large(tmp_path: Path) -> None:
    """Of the values as of the scales that were kept."""
    for bits in (3, 4, 8):
        packed = compressed_ints(6, 64, bits, 32)
        packed.tensors["weight_scale"][2, 0] = 3e38
        tensor = fold(tmp_path / str(bits), config("pack-quantized", ints(bits, 32)), packed.named("a"))["a.weight"]
        with pytest.raises(SourceError, match="a.weight has NaN or infinite values"):
            tensor.read()
        with pytest.raises(SourceError, match="a.weight has scales that float16 cannot hold"):
            tensor.read_quantized()


@pytest.mark.parametrize("bad", [0.0, 1e-40, float("nan"), float("inf")])
def test_divisors_that_are_none(bad: float, tmp_path: Path) -> None:
    """Of an infinite one all values were 0."""
    parts = compressed_fp4(6, 64, "nvfp4").named("a")
    parts["a.weight_global_scale"][0] = bad
    with pytest.raises(SourceError, match=r"a.weight(_global_scale)? has NaN or infinite values"):
        fold(tmp_path / "t", config("nvfp4-pack-quantized", FOURS["nvfp4"]), parts)["a.weight"].read()


def group(**changes: Any) -> dict[str, Any]:
    """What is told of is in the weights of a group."""
    return {"config_groups": {"g": {"weights": INTS | changes}}}


HUGE = 10**400
BAD_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"formaat": 1}, "unknown keys 'formaat' (near: format): llmc does not guess"),
    "status": ({"quantization_status": "frozen"}, "quantization_status = 'frozen', wanted 'compressed'"),
    "status list": ({"quantization_status": ["compressed"]}, "quantization_status = ['compressed']"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is set: llmc reads dense"),
    "sparse text": ({"sparsity_config": "dense"}, "sparsity_config is set"),
    "transform": ({"transform_config": {"config_groups": {}}}, "transform_config is set: the model is not the one"),
    "no groups": ({"config_groups": {}}, "config_groups = {}, wanted a table of groups"),
    "group list": ({"config_groups": [1]}, "config_groups = [1], wanted a table of groups"),
    "group text": ({"config_groups": {"g": "W4A16"}}, "config_groups.'g': 'W4A16', wanted a table with weights"),
    "no weights": ({"config_groups": {"g\n": {"weights": None}}}, "config_groups.'g\\n': {'weights': None}, wanted"),
    "group key": ({"config_groups": {"g": {"weights": INTS, "target": []}}}, "unknown key 'target' (near: targets)"),
    "format": ({"format": "marlin-24"}, "format = 'marlin-24', llmc reads pack-quantized, int-quantized, float-"),
    "format list": ({"format": ["pack-quantized"]}, "format = ['pack-quantized']"),
    "no format": ({"format": None}, "format = None"),
    "weight key": (group(blok_structure=1), "weights: unknown key 'blok_structure' (near: block_structure)"),
    "bits": (group(num_bits=9), "weights.num_bits = 9 of type 'int', wanted 1, 2, 3, 4, 5, 6, 7, 8 of int"),
    "no bits": (group(num_bits=0), "weights.num_bits = 0"),
    "float bits": (group(num_bits=4.0), "weights.num_bits = 4.0"),
    "bool bits": (group(num_bits=True), "weights.num_bits = True"),
    "nan bits": (group(num_bits=float("nan")), "weights.num_bits = nan"),
    "list bits": (group(num_bits=[4]), "weights.num_bits = [4]"),
    "many bits": (group(num_bits=HUGE), "weights.num_bits = 1000"),
    "type": (group(type="float"), "of type 'float', wanted 1, 2, 3, 4, 5, 6, 7, 8 of int as pack-quantized"),
    "type list": (group(type=["int"]), "of type ['int']"),
    "symmetric": (group(symmetric=1), "weights.symmetric = 1, wanted true"),
    "symmetric table": (group(symmetric={}), "weights.symmetric = {}"),
    "dynamic": (group(dynamic=True), "weights.dynamic = True, wanted false"),
    "order": (group(actorder="weights"), "weights.actorder = 'weights'"),
    "order list": (group(actorder=["group"]), "weights.actorder = ['group']"),
    "strategy": (group(strategy="token"), "weights.strategy = 'token' with group_size 32"),
    "strategy list": (group(strategy=["group"]), "weights.strategy = ['group']"),
    "block": (group(strategy="block", block_structure=[4, 4]), "weights.strategy = 'block'"),
    "group size": (group(group_size=0), "with group_size 0"),
    "big group": (group(group_size=HUGE), "with group_size 1000"),
    "true group": (group(group_size=True), "with group_size True"),
    "nan group": (group(group_size=float("nan")), "with group_size nan"),
    "uneven int": ({"format": "int-quantized", **group(num_bits=8, symmetric=False)}, "symmetric = False, wanted true"),
    "int bits": ({"format": "int-quantized"}, "num_bits = 4 of type 'int', wanted 8 of int as int-quantized"),
    "float int": ({"format": "float-quantized", **group(num_bits=8)}, "of type 'int', wanted 8 of float"),
    "float blocks": ({"format": "float-quantized", **group(num_bits=8, type="float", strategy="block",
                      block_structure=[128, 0])}, "block_structure [128, 0]"),
    "block text": ({"format": "float-quantized", **group(num_bits=8, type="float", strategy="block",
                    block_structure="ab")}, "block_structure 'ab'"),
    "block of three": ({"format": "float-quantized", **group(num_bits=8, type="float", strategy="block",
                        block_structure=[4, 4, 4])}, "block_structure [4, 4, 4]"),
    "mxfp4 group": ({"format": "mxfp4-pack-quantized", **group(type="float", group_size=16)}, "group_size = 16, wanted "
                    "32 as mxfp4-pack-quantized"),
    "nvfp4 rows": ({"format": "nvfp4-pack-quantized", **group(type="float", strategy="channel")}, "= 'channel'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config(case: str) -> None:
    changes, message = BAD_CONFIG[case]
    table = config("pack-quantized", INTS)["quantization_config"] | changes
    found = faults_of({"quantization_config": table})
    assert message in found
    assert found.startswith("quantization_config")


@pytest.mark.parametrize(
    ("format", "weights", "scheme"),
    [
        ("pack-quantized", INTS | {"group_size": 128}, ("pack-quantized", 4, True, 1, 128)),
        ("pack-quantized", {"num_bits": 3}, ("pack-quantized", 3, True, WHOLE, WHOLE)),
        ("int-quantized", {}, ("int-quantized", 8, True, WHOLE, WHOLE)),
        ("int-quantized", {"group_size": -1}, ("int-quantized", 8, True, 1, WHOLE)),
        ("pack-quantized", {"num_bits": 2, "group_size": 64, "actorder": "static"}, ("pack-quantized", 2, True, 1, 64)),
        ("naive-quantized", {"type": "float"}, ("float-quantized", 8, True, WHOLE, WHOLE)),
        ("float-quantized", FLOATS | {"strategy": "block", "block_structure": [128, 64]},
         ("float-quantized", 8, True, 128, 64)),
        ("nvfp4-pack-quantized", FOURS["nvfp4"], ("nvfp4-pack-quantized", 4, True, 1, 16)),
    ],
)  # fmt: skip
def test_what_config_json_may_say(format: str, weights: dict[str, Any], scheme: tuple[Any, ...]) -> None:
    faults: list[str] = []
    found = packing_of(config(format, weights, weights, quant_method="Compressed-Tensors"), faults)
    assert not faults
    assert found == CompressedPacking((Scheme(*scheme),))
