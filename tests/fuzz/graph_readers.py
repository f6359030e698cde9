"""Readers of exported graphs: of their files alone; tests/frontends/test_onnx_file.py imports changed operators too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from mutate import change_bytes
from onnx import TensorProto, helper, numpy_helper
from reader import Reader, read_tensors

from llmc.compiler.errors import SourceError
from llmc.frontends.importers.exported import is_plain_size
from llmc.frontends.onnx_tensors import read_onnx_tensors


def _onnx(folder: Path) -> Reader:
    """A small graph with tensors of several kinds: plain, in lists of numbers, quantized, in another file."""
    (folder / "w.bin").write_bytes(bytes(range(64)))
    outside = TensorProto(name="outside", data_type=TensorProto.FLOAT, dims=[4, 4])
    outside.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "0", "length": "64"}.items():
        outside.external_data.add(key=key, value=value)
    arrays = {
        "a.norm.weight": np.ones(4, np.float32), "half": np.ones((2, 3), np.float16),
        "onnx::MatMul_1_quantized": np.arange(12, dtype=np.int8).reshape(4, 3),
        "onnx::MatMul_1_scale": np.array(0.5, np.float32), "onnx::MatMul_1_zero_point": np.array(3, np.int8),
    }  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "onnx::MatMul_1_quantized"], ["y"], name="/a/q/MatMul")], "g", [], [],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()]
        + [outside, helper.make_tensor("list", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])],
    )  # fmt: skip
    samples = [helper.make_model(graph).SerializeToString()]
    path = folder / "a.onnx"

    def read(_: bytes) -> None:
        tensors = read_onnx_tensors([path], {"a.q.weight"})
        plain = {name: tensor for name, tensor in tensors.items() if tensor.nbytes <= path.stat().st_size}
        read_tensors(path, plain)

    return Reader(samples, lambda random: change_bytes(random, samples), read, lay=path.write_bytes)


def _size(folder: Path) -> Reader:
    """The text of a size in a .pt2 file, which torch evaluates."""
    samples = [b"2*Symbol('s77', positive=True, integer=True)", b"Mod(s0, 4) + FloorDiv(s1, 2)", b"Max(s0, -3)**2"]

    def read(data: bytes) -> None:
        if not is_plain_size(data.decode("utf-8", "replace")):
            raise SourceError("no plain size")

    return Reader(samples, lambda random: change_bytes(random, samples), read)


GRAPHS: dict[str, Callable[[Path], Reader]] = {"onnx": _onnx, "pt2-size": _size}
