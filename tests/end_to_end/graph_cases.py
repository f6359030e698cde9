"""Small ONNX graphs for test_graphs.py: every group of operators that the importer treats in a way of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
Node = tuple[str, Sequence[str], Sequence[str], dict[str, Any]]


def save(
    path: Path, nodes: Sequence[Node], inputs: dict[str, Any], outputs: Sequence[str],
    constants: dict[str, NDArray[Any]], **how: Any,
) -> Path:  # fmt: skip
    """Write a graph; `inputs` are name -> (type of ONNX, shape)."""
    graph = helper.make_graph(
        [helper.make_node(op, list(takes), list(gives), **attrs) for op, takes, gives, attrs in nodes],
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    for output in graph.output:
        output.ClearField("type")
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.save(onnx.shape_inference.infer_shapes(model), path, **how)
    return path


def layers(path: Path, **how: Any) -> Path:
    """Two linear layers with a norm between them, and a table; sizes named batch and length."""
    random = np.random.default_rng(0)

    def f(*shape: int) -> NDArray[np.float32]:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    nodes: list[Node] = [
        ("Gather", ["table", "ids"], ["x"], {}),
        ("MatMul", ["x", "w1"], ["h0"], {}),
        ("Add", ["h0", "b1"], ["h1"], {}),
        ("LayerNormalization", ["h1", "gain", "b1"], ["h2"], {"axis": -1}),
        ("Erf", ["h2"], ["h3"], {}),
        ("MatMul", ["h3", "w2"], ["y0"], {}),
        ("Softmax", ["y0"], ["y"], {"axis": -1}),
        ("ReduceMean", ["h3", "one"], ["mean"], {"keepdims": 0}),
        ("Gemm", ["mean", "w3", "b3"], ["z"], {"transB": 1}),
    ]
    constants = {
        "table": f(50, 64), "w1": f(64, 96), "b1": f(96), "gain": 1 + f(96), "w2": f(96, 70), "w3": f(48, 96),
        "b3": f(48), "one": np.array([1], np.int64),
    }  # fmt: skip
    return save(path, nodes, {"ids": (TensorProto.INT64, ["batch", "length"])}, ["y", "z"], constants, **how)


def shapes(path: Path) -> Path:
    """What exporters do with sizes: heads split and joined, masks of a length, tables cut, broadcasting to a size."""
    i = {name: np.array(value, np.int64) for name, value in {
        "zero": 0, "one": 1, "first": [0], "second": [1], "third": [2], "end": [2**63 - 1], "minus": [-1],
        "split": [0, 0, 4, 6], "joined": [0, -1, 24], "two": [2], "low": [-3],
    }.items()}  # fmt: skip
    nodes: list[Node] = [
        ("Shape", ["x"], ["s"], {}),
        ("Gather", ["s", "first"], ["n"], {}),
        ("Gather", ["s", "one"], ["t"], {}),
        ("Unsqueeze", ["t", "first"], ["t1"], {}),
        ("Reshape", ["x", "split"], ["x4"], {}),
        ("Transpose", ["x4"], ["q"], {"perm": [0, 2, 1, 3]}),
        ("Transpose", ["x4"], ["k"], {"perm": [0, 2, 3, 1]}),
        ("MatMul", ["q", "k"], ["scores"], {}),
        ("Range", ["zero", "t", "one"], ["places"], {}),
        ("Unsqueeze", ["places", "second"], ["column"], {}),
        ("GreaterOrEqual", ["column", "places"], ["causal"], {}),
        ("Slice", ["positions", "first", "t1", "first"], ["cut"], {}),
        ("Where", ["causal", "scores", "far"], ["masked"], {}),
        ("Softmax", ["masked"], ["weights"], {"axis": -1}),
        ("MatMul", ["weights", "q"], ["mixed"], {}),
        ("Transpose", ["mixed"], ["back"], {"perm": [0, 2, 1, 3]}),
        ("Reshape", ["back", "joined"], ["flat"], {}),
        ("Add", ["flat", "cut"], ["y"], {}),
        ("Concat", ["n", "t1", "two"], ["wide"], {"axis": 0}),
        ("ConstantOfShape", ["wide"], ["ones"], {"value": numpy_helper.from_array(np.array([1.5], np.float32))}),
        ("Slice", ["x", "low", "end", "third", "two"], ["every"], {}),
        ("Concat", ["ones", "every"], ["z"], {"axis": 2}),
        ("Mul", ["n", "t1"], ["count"], {}),
        ("Cast", ["count"], ["rows"], {"to": TensorProto.FLOAT}),
        ("GatherND", ["x", "spots"], ["picked"], {}),
    ]
    constants = {
        **i, "far": np.array(-1e9, np.float32),
        "positions": np.linspace(0, 1, 32 * 24, dtype=np.float32).reshape(32, 24),
        "spots": np.array([[0, 0], [-1, -1]], np.int64),
    }  # fmt: skip
    del constants["minus"]
    return save(path, nodes, {"x": (TensorProto.FLOAT, ["n", "t", 24])}, ["y", "z", "rows", "picked"], constants)


def pictures(path: Path) -> Path:
    """Convolutions and what goes with them."""
    random = np.random.default_rng(1)
    nodes: list[Node] = [
        ("Conv", ["x", "k1", "b1"], ["c1"], {"pads": [1, 1, 1, 1]}),
        ("Relu", ["c1"], ["r1"], {}),
        ("MaxPool", ["r1"], ["p1"], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Conv", ["p1", "k2"], ["c2"], {"group": 4, "strides": [2, 2]}),
        ("BatchNormalization", ["c2", "gain", "shift", "mean", "var"], ["n2"], {}),
        ("Sigmoid", ["n2"], ["g2"], {}),
        ("Mul", ["n2", "g2"], ["s2"], {}),
        ("GlobalAveragePool", ["s2"], ["a"], {}),
        ("Flatten", ["a"], ["y"], {}),
        ("Pad", ["p1", "pads"], ["z"], {}),
    ]
    constants = {
        "k1": random.standard_normal((4, 3, 3, 3)).astype(np.float32),
        "b1": random.standard_normal(4).astype(np.float32),
        "k2": random.standard_normal((8, 1, 3, 3)).astype(np.float32),
        "pads": np.array([0, 0, 1, 0, 0, 0, 0, 2], np.int64),
        "gain": np.full(8, 1.5, np.float32), "shift": np.full(8, 0.5, np.float32), "mean": np.full(8, 0.1, np.float32),
        "var": np.full(8, 2, np.float32),
    }  # fmt: skip
    return save(path, nodes, {"x": (TensorProto.FLOAT, ["n", 3, 12, 12])}, ["y", "z"], constants)


def bytes_of_weights(path: Path) -> Path:
    """8-bit integers: weights alone, and activations too; 300 columns, more than one sum of products holds exactly."""
    random = np.random.default_rng(2)
    nodes: list[Node] = [
        ("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], {}),
        ("MatMulInteger", ["q", "w", "qz", "wz"], ["sums"], {}),
        ("Cast", ["sums"], ["whole"], {"to": TensorProto.FLOAT}),
        ("Mul", ["qs", "ws"], ["scale"], {}),
        ("Mul", ["whole", "scale"], ["y"], {}),
        ("DequantizeLinear", ["columns", "cs", "cz"], ["matrix"], {"axis": 1}),
        ("MatMul", ["x", "matrix"], ["z"], {}),
        ("QuantizeLinear", ["z", "ws", "wz"], ["zq"], {}),
    ]
    constants = {
        "w": random.integers(-128, 128, (300, 64)).astype(np.int8), "wz": np.array(3, np.int8),
        "ws": np.array(0.02, np.float32), "columns": random.integers(-128, 128, (300, 32)).astype(np.int8),
        "cs": np.linspace(0.01, 0.03, 32, dtype=np.float32), "cz": random.integers(-9, 9, 32).astype(np.int8),
    }  # fmt: skip
    return save(path, nodes, {"x": (TensorProto.FLOAT, ["rows", 300])}, ["sums", "y", "z", "zq"], constants)
