"""GPTQ layers of 2, 3 and 8 bits; test_int4_tensors.py and test_int4_folder.py have 4, and what all refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SourceError

sys.path.insert(0, str(Path(__file__).parent))
from quantized_layers import Packed, gptq
from quantized_reading import check, fold, refusal

BITS = (2, 3, 8)
KEPT = {2: "q2", 3: "q3", 8: "q8"}  # where every zero is in the middle; others no format of ours has


def config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": group, **more}}


@pytest.mark.parametrize(("columns", "group"), [(96, 32), (128, 64), (192, -1), (96, 64)])
@pytest.mark.parametrize("bits", BITS)
def test_zeros_of_their_own(bits: int, columns: int, group: int, tmp_path: Path) -> None:
    top = (1 << bits) - 1
    for format, least, less in (("gptq", 1, 1), ("gptq_v2", 0, 0)):
        packed = gptq(64, columns, bits, group, (least, top), less)
        found = fold(tmp_path / format, config(bits, group, checkpoint_format=format), packed.named("a"))
        assert found["a.weight"].stored == f"GPTQ{bits}"
        check(found["a.weight"], packed.values, None)


@pytest.mark.parametrize(("columns", "group"), [(96, 32), (128, 64), (192, -1)])
@pytest.mark.parametrize("bits", BITS)
def test_zeros_in_the_middle(bits: int, columns: int, group: int, tmp_path: Path) -> None:
    middle = 1 << (bits - 1)
    packed = gptq(64, columns, bits, group, (middle, middle))
    tensor = fold(tmp_path / "t", config(bits, group, sym=True), packed.named("a"))["a.weight"]
    check(tensor, packed.values, KEPT[bits])
    wrong = gptq(64, columns, bits, group, (middle, middle), less=0).named("b")
    tensor = fold(tmp_path / "u", config(bits, group, sym=True), wrong)["b.weight"]
    for read in (tensor.read, tensor.read_quantized):
        with pytest.raises(SourceError, match=rf"b.qzeros has a zero point of {middle + 1}, wanted {middle} since"):
            read()


@settings(deadline=None, max_examples=20)
@given(
    bits=st.sampled_from(BITS),
    rows=st.integers(1, 3),
    columns=st.integers(1, 4),
    group=st.sampled_from([-1, 32, 64]),
    sym=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    tmp_path_factory: pytest.TempPathFactory, bits: int, rows: int, columns: int, group: int, sym: bool, seed: int
) -> None:
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    rows, columns = rows * {2: 16, 3: 32, 8: 4}[bits], 32 * columns
    packed = gptq(rows, columns, bits, group, (middle, middle) if sym else (1, top), seed=seed)
    path = tmp_path_factory.mktemp("t") / "t"
    check(
        fold(path, config(bits, group, sym=sym), packed.named("a"))["a.weight"],
        packed.values,
        KEPT[bits] if sym else None,
    )


@pytest.mark.parametrize("bits", BITS)
def test_zeros_that_mean_two_things(bits: int, tmp_path: Path) -> None:
    top = (1 << bits) - 1
    packed = gptq(32, 64, bits, 32, (top + 1, top + 1))
    tensor = fold(tmp_path / "t", config(bits, 32), packed.named("a"))["a.weight"]
    with pytest.raises(SourceError, match=f"a.qzeros has zero points stored as {top}, less one, which some readers"):
        tensor.read()


PARTS = gptq(32, 64, 3, 32, (1, 7)).tensors
BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "words": (3, {"qweight": PARTS["qweight"][:5]}, "32 rows of 53, wanted multiples of 32 and 32"),
    "rows": (3, {"qweight": PARTS["qweight"][:, :16]}, "16 rows of 64, wanted multiples of 32 and 32"),
    "zeros": (3, {"qzeros": PARTS["qzeros"][:, :2]}, "qzeros has shape [2, 2], wanted [2, 3] for 32 rows of 64"),
    "scales": (3, {"scales": torch.ones(3, 32)}, "scales has shape [3, 32], wanted [2, 32]"),
    "other bits": (2, {}, "qzeros has shape [2, 3], wanted [3, 2] for 32 rows of 96 in groups of 32"),
    "no zeros": (3, {"qzeros": ...}, "missing qzeros"),
    "type": (3, {"qweight": PARTS["qweight"].view(torch.uint32)}, "qweight is stored as U32, wanted I32"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parts(case: str, tmp_path: Path) -> None:
    bits, changes, message = BAD[case]
    tensors = Packed(PARTS | changes, PARTS["scales"].numpy()).named("a")
    found = refusal(tmp_path / "t", config(bits, 32), tensors)
    assert found.startswith("x: quantized tensors do not fit: a.weight: ")
    assert message in found
