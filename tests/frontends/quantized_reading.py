"""What the readers of quantized folders make of a file's tensors, and what is to be true of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import block_format, dequantize, encode
from llmc.frontends.files.safetensors_file import read_safetensors
from llmc.frontends.hf.quantization import packing_of
from llmc.frontends.tensor import Tensor


def fold(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, `...` left out, as a folder of this config.json has them."""
    faults: list[str] = []
    packing = packing_of(dict(config), faults)
    assert not faults, faults
    assert packing is not None
    save_file({name: own.clone() for name, own in tensors.items() if isinstance(own, torch.Tensor)}, path)
    return packing.fold(read_safetensors(path), "x")


NEAR = {"nf4": 0.0045}  # formats whose values are not those of the file -> how far off, of the matrix's greatest


def check_values(got: np.ndarray, exact: np.ndarray, kept: str) -> None:
    """What a format keeps is what the file has, or nearly."""
    np.testing.assert_allclose(got, exact, rtol=0, atol=NEAR.get(kept, 0) * np.abs(exact).max())


def check(tensor: Tensor, values: np.ndarray, kept: str | None) -> None:
    """A matrix has these values, each of one rounding; pieces are the whole; a format has its codes, `kept` or none."""
    exact = values.astype(np.float32)
    rows, columns = exact.shape
    assert (tensor.shape, tensor.readable, tensor.kept) == ((rows, columns), True, kept)
    np.testing.assert_array_equal(tensor.read(), exact)
    for start, stop in ((0, 1), (rows // 3, rows), (rows - 1, rows), (rows // 2, rows // 2)):
        np.testing.assert_array_equal(tensor.read_rows(start, stop), exact[start:stop])
    if kept is None:
        return
    format = block_format(kept)
    quantized = tensor.read_quantized()
    whole = dequantize(format, quantized)
    check_values(whole[:, :columns], exact, kept)
    assert not whole[:, columns:].any()
    packed = encode(format, quantized, rows, columns)
    np.testing.assert_array_equal(format.unpack(packed, rows, columns), whole[:, :columns])


def refusal(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """The one line that the tensors are refused with."""
    with pytest.raises(LlmcError) as caught:
        fold(path, config, tensors)
    message = str(caught.value)
    assert "\n" not in message
    return message


def faults_of(config: Mapping[str, Any]) -> str:
    """What is wrong with a config.json, of which nothing is made then."""
    faults: list[str] = []
    assert packing_of(dict(config), faults) is None
    assert faults
    assert all("\n" not in fault and len(fault) < 1000 for fault in faults)
    return "; ".join(faults)
