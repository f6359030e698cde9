"""Numbers of a few bits: a slow reading of whole rows as one long number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.frontends.quantized.bits import unpack


@pytest.mark.parametrize("bits", range(1, 9))
@given(rows=st.integers(0, 3), width=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_numbers_stand_one_behind_another(bits: int, rows: int, width: int, seed: int) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, (rows, width), np.uint8)
    count = 8 * width // bits
    found = unpack(raw, bits, count)
    assert found.shape == (rows, count)
    for row, numbers in zip(raw, found, strict=True):
        whole = int.from_bytes(row.tobytes(), "little")
        assert numbers.tolist() == [whole >> bits * i & ((1 << bits) - 1) for i in range(count)]
