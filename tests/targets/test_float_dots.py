"""Dots that are read as float32 (targets/matrices/float_dots.py): what makes them exact."""

from __future__ import annotations

import numpy as np

from llmc.targets.matrices.float_dots import BASE, BITS


def test_base_times_a_scale_of_a_block_is_exact() -> None:
    of_256 = (np.arange(1024, 2048) * 2.0**-20).astype(np.float16).astype(np.float32)[:, None]
    of_a_block = np.arange(1, 256, dtype=np.float32)
    of_a_codebook = np.arange(-128, 128, dtype=np.float32) * np.abs(np.arange(-128, 128, dtype=np.float32))
    for scales in (of_256, of_256 * of_a_block, of_256 * of_a_block / 8, of_a_codebook):
        assert np.array_equal((scales * np.float32(BASE)).astype(np.float64), scales.astype(np.float64) * BASE)


def test_a_dot_is_what_the_base_has_been_moved_by() -> None:
    most = 64 * 255 * 128  # columns of a step, a byte of weights, one of activations
    dots = np.array([0, 1, -1, 255, most, -most], np.int32)
    assert np.array_equal((dots + np.int32(BITS)).view(np.float32) - np.float32(BASE), dots)
