"""Matrices as bitsandbytes quantizes them: the values, to the same roundings, and what is refused."""

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
from llmc.frontends.quantized.bitsandbytes import BnbPacking

sys.path.insert(0, str(Path(__file__).parent))
from quantized_layers import bnb_eight, bnb_four, json_bytes
from quantized_reading import check, faults_of, fold, refusal

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def config(table: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"quantization_config": table | changes}


@pytest.mark.parametrize("nested", [0, 4])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(8, 64, 64), (9, 256, 128), (7, 96, 64), (64, 32, 32), (5, 33, 32), (3, 128, 256), (1, 1, 64)],
)
def test_four_bits(kind: str, nested: int, rows: int, columns: int, block: int, tmp_path: Path) -> None:
    """Blocks go on from row to row; the last may be shorter, and so may the last byte."""
    packed = bnb_four(rows, columns, kind, block, nested)
    tensors = packed.named("a") | {"norm.weight": torch.ones(3)}
    found = fold(tmp_path / "t", config(FOUR), tensors)
    assert set(found) == {"a.weight", "norm.weight"}
    assert found["a.weight"].stored == kind.upper()
    fits = kind == "nf4" and columns % block == 0 and block % 64 == 0
    check(found["a.weight"], packed.values, "nf4" if fits else None)


def test_a_map_of_its_own(tmp_path: Path) -> None:
    """What nf4's codes stand for is known; others are read as numbers."""
    parts = bnb_four(8, 64, "nf4").named("a")
    parts["a.weight.quant_map"] = parts["a.weight.quant_map"] * torch.linspace(0.98, 1, 16)
    assert fold(tmp_path / "t", config(FOUR), parts)["a.weight"].kept is None


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(1, 80),
    block=st.sampled_from([1, 32, 50, 64, 128]),
    nested=st.sampled_from([0, 1, 3, 256]),
    start=st.integers(0, 19),
    count=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int, columns: int, block: int, nested: int, start: int, count: int, seed: int,
) -> None:  # fmt: skip
    packed = bnb_four(rows, columns, "nf4", block, nested, seed)
    tensor = fold(tmp_path_factory.mktemp("t") / "t", config(FOUR), packed.named("a"))["a.weight"]
    start = min(start, rows)
    stop = min(start + count, rows)
    np.testing.assert_array_equal(tensor.read_rows(start, stop), packed.values[start:stop].astype(np.float32))


@pytest.mark.parametrize("columns", [64, 96])
def test_eight_bits(columns: int, tmp_path: Path) -> None:
    packed = bnb_eight(11, columns)
    found = fold(tmp_path / "t", config(EIGHT), packed.named("a") | {"norm.weight": torch.ones(3)})
    assert set(found) == {"a.weight", "norm.weight"}
    assert found["a.weight"].stored == "INT8"
    check(found["a.weight"], packed.values, "q8")


def test_eight_bits_of_rows_that_no_blocks_make(tmp_path: Path) -> None:
    packed = bnb_eight(11, 40)
    check(fold(tmp_path / "t", config(EIGHT), packed.named("a"))["a.weight"], packed.values, None)


def test_any_greatest_values(tmp_path: Path) -> None:
    """Two roundings as floats; what is kept has scales as near as float16 is."""
    parts = bnb_eight(11, 64).named("a")
    parts["a.SCB"] = torch.linspace(0.05, 0.1, 11)
    del parts["a.weight_format"]  # which older ones do not write
    tensor = fold(tmp_path / "t", config(EIGHT), parts)["a.weight"]
    values = parts["a.weight"].double().numpy() * parts["a.SCB"].double().numpy()[:, None] / 127
    np.testing.assert_allclose(tensor.read(), values, rtol=2.0**-22)
    scale = tensor.read_quantized().tables["scale"]
    np.testing.assert_allclose(scale, parts["a.SCB"].numpy()[:, None] / 127 * np.ones((1, 2)), rtol=2.0**-11)


# --- what is refused -----------------------------------------------------------------------------

NF4, NESTED, INT8 = (
    packed.tensors for packed in (bnb_four(4, 64, "nf4"), bnb_four(4, 64, "nf4", 64, 2), bnb_eight(4, 64))
)
W, STATE = "weight", "weight.quant_state.bitsandbytes__nf4"
SAID = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 64]}
MORE = {"nested_blocksize": 2, "nested_dtype": "float32", "nested_offset": 0.5}


def state(**changes: Any) -> dict[str, Any]:
    """Another quant_state; `...` leaves a key out."""
    return {STATE: json_bytes({key: value for key, value in (SAID | changes).items() if value is not ...})}


BAD_FOUR: dict[str, tuple[dict[str, Any], str]] = {
    "no absmax": (NF4 | {f"{W}.absmax": ...}, "a.weight: missing absmax"),
    "no map": (NF4 | {f"{W}.quant_map": ...}, "a.weight: missing quant_map"),
    "no state": (NF4 | {STATE: ...}, "a.weight: missing quant_state.bitsandbytes__"),
    "no codes": (NF4 | {W: ...}, "a.weight: missing weight"),
    "two states": (NF4 | {f"{W}.quant_state.bitsandbytes__fp4": NF4[STATE]}, "two of quant_state.bitsandbytes__"),
    "state's type": (NF4 | {STATE: NF4[STATE].float()}, "bitsandbytes__nf4 is stored as F32"),
    "long state": (NF4 | {STATE: torch.zeros(5000, dtype=torch.uint8)}, "5000 bytes, wanted U8, at most 4096"),
    "type": (NF4 | {W: NF4[W].char()}, "weight is stored as I8, wanted U8"),
    "floats": (NF4 | {W: torch.ones(4, 64)}, "weight is stored as F32, wanted U8"),
    "turned": (NF4 | {W: NF4[W].reshape(1, -1)}, "weight has shape [1, 128], wanted [128, 1] for [4, 64]"),
    "short": (NF4 | {W: NF4[W][:-1]}, "weight has shape [127, 1], wanted [128, 1]"),
    "absmax": (NF4 | {f"{W}.absmax": torch.ones(3)}, "absmax has shape [3], wanted [4]"),
    "absmax's type": (NF4 | {f"{W}.absmax": torch.ones(4).half()}, "absmax is stored as F16, wanted F32"),
    "map": (NF4 | {f"{W}.quant_map": torch.ones(15)}, "quant_map has shape [15], wanted [16]"),
    "map's type": (NF4 | {f"{W}.quant_map": torch.ones(16).double()}, "quant_map is stored as F64, wanted F32"),
    "scalar": (NF4 | {f"{W}.absmax": torch.tensor(1.0)}, "absmax has shape [], wanted [4]"),
    "bytes": (NF4 | {f"{W}.absmax": NESTED[f"{W}.absmax"]}, "absmax is stored as U8, wanted F32"),
    "nested": (NF4 | {f"{W}.nested_absmax": torch.ones(2)}, "nested_absmax, which quant_state.bitsandbytes__ does not"),
    "eight": (NF4 | {"SCB": torch.ones(4)}, "SCB, which 4 bits do not have"),
    "not nested": (NESTED | {f"{W}.nested_absmax": ...}, "missing nested_absmax"),
    "no nested map": (NESTED | {f"{W}.nested_quant_map": ...}, "missing nested_quant_map"),
    "nested type": (NESTED | {f"{W}.absmax": torch.ones(4)}, "absmax is stored as F32, wanted U8"),
    "nested shape": (NESTED | {f"{W}.nested_absmax": torch.ones(3)}, "nested_absmax has shape [3], wanted [2]"),
    "nested map": (NESTED | {f"{W}.nested_quant_map": torch.ones(16)}, "nested_quant_map has shape [16], wanted [256]"),
    "rows": (NF4 | state(shape=[5, 64]), "absmax has shape [4], wanted [5]"),
    "sizes": (NF4 | state(shape=[256]), "has shape [256] and blocksize 64, wanted two sizes and one"),
    "no sizes": (NF4 | state(shape=None), "has shape None and blocksize 64"),
    "negative": (NF4 | state(shape=[-4, -64]), "has shape [-4, -64]"),
    "huge": (NF4 | state(shape=[4, 1 << 40]), "has shape [4, 1099511627776]"),
    "large": (NF4 | state(shape=[(1 << 31) - 1, (1 << 31) - 1]), "absmax has shape [4], wanted ["),
    "fraction": (NF4 | state(shape=[4.0, 64]), "has shape [4.0, 64]"),
    "true": (NF4 | state(shape=[4, 64], blocksize=True), "blocksize True"),
    "block": (NF4 | state(blocksize=0), "blocksize 0"),
    "wide block": (NF4 | state(blocksize=1 << 20), "blocksize 1048576"),
    "other block": (NF4 | state(blocksize=128), "absmax has shape [4], wanted [2]"),
    "kind": (NF4 | state(quant_type="fp4"), "bitsandbytes__nf4 has quant_type 'fp4'"),
    "kind list": (NF4 | state(quant_type=["nf4"]), "has quant_type ['nf4']"),
    "key": (NF4 | state(zero=1), "has keys ['blocksize', 'dtype', 'quant_type', 'shape', 'zero'], wanted blocksize"),
    "no key": (NF4 | state(dtype=...), "has keys ['blocksize', 'quant_type', 'shape'], wanted"),
    "half nested": (NESTED | state(nested_offset=0.5), "wanted blocksize, dtype, nested_blocksize, nested_dtype"),
    "offset": (NESTED | state(**MORE | {"nested_offset": None}), "nested_offset = None, wanted a number"),
    "nested block": (NESTED | state(**MORE | {"nested_blocksize": 0}), "wanted two sizes and one"),
}
BAD_EIGHT: dict[str, tuple[dict[str, Any], str]] = {
    "no codes": (INT8 | {W: ...}, "a.weight, b.weight: missing weight"),
    "no scales": (INT8 | {"SCB": ...}, "a.weight: missing SCB"),
    "type": (INT8 | {W: INT8[W].view(torch.uint8)}, "weight is stored as U8, wanted I8"),
    "scales' type": (INT8 | {"SCB": torch.ones(4).half()}, "SCB is stored as F16, wanted F32"),
    "format": (INT8 | {"weight_format": torch.tensor(1, dtype=torch.uint8)}, "weight_format is not 0"),
    "formats": (INT8 | {"weight_format": torch.zeros(4, dtype=torch.uint8)}, "weight_format is not 0"),
    "format's type": (INT8 | {"weight_format": torch.tensor(0)}, "weight_format is stored as I64, wanted U8"),
    "scales": (INT8 | {"SCB": torch.ones(5)}, "weight and SCB have shapes [4, 64] and [5], wanted [N, K], [N]"),
    "flat": (INT8 | {W: INT8[W].reshape(-1)}, "have shapes [256] and [4]"),
    "empty": (INT8 | {W: INT8[W][:, :0]}, "have shapes [4, 0] and [4]"),
    "four": (INT8 | {f"{W}.absmax": torch.ones(4)}, "absmax, which 8 bits do not have"),
}
BAD_PARTS = {
    f"{bits} {case}": found for bits, cases in ((4, BAD_FOUR), (8, BAD_EIGHT)) for case, found in cases.items()
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_bad_parts(case: str, tmp_path: Path) -> None:
    """Each is told with what is wrong elsewhere."""
    parts, message = BAD_PARTS[case]
    tensors = {f"a.{part}": tensor for part, tensor in parts.items()} | {"b.SCB": torch.ones(2)}
    found = refusal(tmp_path / "t", config(FOUR if case.startswith("4") else EIGHT), tensors)
    assert found.startswith("x: quantized tensors do not fit: ")
    assert "a.weight" in found
    assert message in found
    assert "b.weight: missing weight" in found or "a.weight, b.weight: missing weight" in found


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"shape": NaN}', b'{"a": 1, "a": 1}', b"\xff", b"[" * 4000, b""], ids=lambda text: text[:9]
)
def test_a_state_that_is_not_json(text: bytes, tmp_path: Path) -> None:
    tensors = {f"a.{part}": tensor for part, tensor in NF4.items()}
    tensors |= {f"a.{STATE}": torch.tensor(list(text), dtype=torch.uint8)}
    assert f"a.{STATE}" in refusal(tmp_path / "t", config(FOUR), tensors)


def test_no_part_at_all(tmp_path: Path) -> None:
    for table in (FOUR, EIGHT):
        message = refusal(tmp_path / "t", config(table), {"a.weight": torch.ones(2, 2)})
        assert "quantized by bitsandbytes, but no tensor is" in message


FLOATS = [(NF4, "absmax"), (NF4, "quant_map"), (NESTED, "nested_absmax"), (NESTED, "nested_quant_map")]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize(("packed", "part"), FLOATS, ids=[part for _, part in FLOATS])
def test_what_is_no_number(packed: dict[str, torch.Tensor], part: str, bad: float, tmp_path: Path) -> None:
    """3e38 is one, but overflows where all that it is multiplied by is 4."""
    parts = {f"a.{name}": tensor.clone() for name, tensor in packed.items()}
    for name, tensor in parts.items():
        if tensor.dtype == torch.float32:
            tensor[:] = bad if name == f"a.{W}.{part}" else 4
    tensor = fold(tmp_path / "t", config(FOUR), parts)["a.weight"]
    with pytest.raises(SourceError, match=r"a.weight(\.\w+)? has NaN or infinite values"):
        tensor.read()


def test_eight_bits_of_no_numbers(tmp_path: Path) -> None:
    parts = bnb_eight(4, 64).named("a")
    parts["a.SCB"][3] = float("nan")
    tensor = fold(tmp_path / "t", config(EIGHT), parts)["a.weight"]
    for read in (tensor.read, tensor.read_quantized):
        with pytest.raises(SourceError, match=r"a.SCB has NaN or infinite values"):
            read()


BAD_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"load_in_4bit": False}, "load_in_4bit and load_in_8bit are both False, wanted one of them"),
    "both": ({"load_in_8bit": True}, "load_in_4bit and load_in_8bit are both True"),
    "number": ({"load_in_4bit": 1}, "load_in_4bit = 1, llmc reads False, True with quant_method bitsandbytes"),
    "text": ({"load_in_4bit": "true"}, "load_in_4bit = 'true'"),
    "list": ({"load_in_8bit": [True]}, "load_in_8bit = [True]"),
    "nan": ({"load_in_8bit": float("nan")}, "load_in_8bit = nan"),
    "huge": ({"load_in_8bit": 10**5000}, "load_in_8bit = a huge number"),
    "storage": ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage = 'bfloat16', llmc reads 'uint8'"),
    "key": ({"bnb_4bit_quant_tipe": "nf4"}, "unknown keys 'bnb_4bit_quant_tipe'"),
    "bits": ({"bits": 4}, "unknown keys 'bits': llmc does not guess"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_bad_config(case: str) -> None:
    changes, message = BAD_CONFIG[case]
    assert message in faults_of(config(FOUR, **changes))


@pytest.mark.parametrize(
    ("table", "bits"),
    [
        (FOUR | {"_load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True}, 4),
        (FOUR | {"bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"]}, 4),
        (EIGHT | {"llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}, 8),
    ],
)
def test_what_config_json_may_say(table: dict[str, Any], bits: int) -> None:
    faults: list[str] = []
    assert packing_of(config(table), faults) == BnbPacking(bits)
    assert not faults
