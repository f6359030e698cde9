"""ONNX files from strangers: nothing outside the file's folder is read, sizes are what they claim, damage is refused.

And the names and values of weights in them, where exporters and quantizers have changed both.
"""

from __future__ import annotations

import os
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from llmc.compiler.errors import LlmcError, SourceError
from llmc.frontends.files.onnx_file import MAX_DEPTH, TensorReader, graphs, read_onnx
from llmc.frontends.importers.exported import import_exported, is_plain_size
from llmc.frontends.importers.onnx_graph import import_onnx
from llmc.frontends.onnx_tensors import read_onnx_tensors

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import graph_cases


def external(path: Path, location: str, **fields: str) -> Path:
    """A graph whose one weight says that it lies in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 8], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **fields}.items():
        tensor.external_data.add(key=key, value=value)
    return with_tensor(path, tensor)


def with_tensor(path: Path, *tensors: Any) -> Path:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", tensors[0].name], ["y"])], "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    graph.initializer.extend(tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", graph_cases.OPSET)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def read_all(path: Path) -> list[Any]:
    reader = TensorReader(path)
    return [reader.array(tensor) for graph in graphs(read_onnx(path).graph, "") for tensor in graph.initializer]


def test_data_below_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    values = np.arange(40, dtype=np.float32)
    (tmp_path / "parts" / "w.bin").write_bytes(values.tobytes())
    path = external(tmp_path / "a.onnx", "parts/w.bin", offset="32", length="128")
    np.testing.assert_array_equal(read_all(path)[0], values[8:].reshape(4, 8))


@pytest.mark.parametrize(
    ("location", "fields"),
    [
        ("../secret.bin", {}),
        ("parts/../../secret.bin", {}),
        ("/etc/hostname", {}),
        ("", {}),
        (".", {}),
        ("parts", {}),
        ("a//secret.bin", {}),
        ("link.bin", {}),
        ("linked/secret.bin", {}),
        ("twin.bin", {}),
        ("gone.bin", {}),
        ("pipe", {}),
        ("own.bin", {"offset": "1"}),
        ("own.bin", {"offset": "-8"}),
        ("own.bin", {"length": "64"}),
        ("own.bin", {"length": "99999999999999999999"}),
        ("C:own.bin", {}),
    ],
)
def test_data_elsewhere_is_not_read(location: str, fields: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "model"
    (home / "parts").mkdir(parents=True)
    for folder in (tmp_path, home):
        (folder / ("secret.bin" if folder is tmp_path else "own.bin")).write_bytes(bytes(128))
    os.symlink(tmp_path / "secret.bin", home / "link.bin")
    os.symlink(tmp_path, home / "linked")
    os.link(tmp_path / "secret.bin", home / "twin.bin")
    os.mkfifo(home / "pipe")
    with pytest.raises(SourceError):
        read_all(external(home / "a.onnx", location, **fields))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.dims.__setitem__(0, 5),
        lambda t: t.dims.__setitem__(0, -4),
        lambda t: t.dims.extend([2**40, 2**40]),
        lambda t: t.dims.extend([1] * 20),
        lambda t: setattr(t, "data_type", TensorProto.STRING),
        lambda t: setattr(t, "data_type", 99),
        lambda t: setattr(t, "raw_data", t.raw_data[:-1]),
        lambda t: (t.ClearField("raw_data"), t.float_data.extend([1.0] * 31)),
    ],
)
def test_values_that_are_not_what_the_shape_says_are_refused(change: Callable[[Any], Any], tmp_path: Path) -> None:
    tensor = numpy_helper.from_array(np.ones((4, 8), np.float32), "w")
    change(tensor)
    with pytest.raises(SourceError, match="tensor 'w'"):
        read_all(with_tensor(tmp_path / "a.onnx", tensor))


def test_graphs_in_graphs_have_a_depth(tmp_path: Path) -> None:
    inner = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [], [])
    for _ in range(MAX_DEPTH + 1):
        node = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
        inner = helper.make_graph([node], "g", [], [])
        if inner.ByteSize() > 1 << 20:
            inner.node[0].attribute.pop()
    path = tmp_path / "a.onnx"
    path.write_bytes(helper.make_model(inner).SerializeToString())
    with pytest.raises(SourceError):
        read_onnx(path)


@pytest.mark.parametrize("data", [b"", b"\x08", b"GGUF" * 20, bytes(100), b"\x0a\xff\xff\xff\xff\x7f", b"\x3a\x00"])
def test_what_is_no_onnx_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(data)
    with pytest.raises(SourceError):
        read_onnx(tmp_path / "a.onnx")


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    """Bytes changed at random: whatever they say, the reader and the importer raise nothing but LlmcError."""
    good = graph_cases.layers(tmp_path / "good.onnx").read_bytes()
    chance = random.Random(0)
    path, refused = tmp_path / "bad.onnx", 0
    for number in range(60):
        data = bytearray(good)
        spots = range(len(data) - 1200, len(data)) if number % 2 else range(len(data))
        for _ in range(chance.randint(1, 8)):
            data[chance.choice(spots)] = chance.randrange(256)
        path.write_bytes(data[: chance.randrange(1, len(data))] if number % 5 == 0 else data)
        try:
            import_onnx(path)
        except LlmcError:
            refused += 1
    assert refused > 10


def test_names_and_values_that_torch_had(tmp_path: Path) -> None:
    random_ = np.random.default_rng(0)
    codes = random_.integers(0, 256, (8, 4)).astype(np.uint8)
    columns = random_.integers(-128, 128, (8, 6)).astype(np.int8)
    nodes = [
        ("MatMulInteger", ["q", "onnx::MatMul_7_quantized"], ["a"], "/wrap/block.0/q/MatMul_quant"),
        ("DequantizeLinear", ["onnx::MatMul_8_quantized", "onnx::MatMul_8_scale"], ["d"], "/wrap/block.0/k/dq"),
        ("MatMul", ["x", "d"], ["b"], "/wrap/block.0/k/MatMul"),
        ("MatMul", ["x", "onnx::MatMul_9"], ["c"], "/wrap/block.0/v/MatMul"),
    ]
    arrays = {
        "onnx::MatMul_7_quantized": codes, "onnx::MatMul_7_scale": np.array(0.1, np.float32),
        "onnx::MatMul_7_zero_point": np.array(7, np.uint8), "onnx::MatMul_8_quantized": columns,
        "onnx::MatMul_8_scale": np.linspace(0.1, 0.6, 6, dtype=np.float32),
        "onnx::MatMul_9": random_.standard_normal((8, 3)).astype(np.float32),
        "wrap.block.0.norm.weight": np.ones(8, np.float16), "scalar": np.array(2.0, np.float32),
        "wrap.table_quantized": codes, "wrap.table_scale": np.array(0.5, np.float32),
    }  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node(op, takes, gives, name=name) for op, takes, gives, name in nodes], "g", [], [],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )  # fmt: skip
    (tmp_path / "a.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    wanted = {"encoder.block.0.q.weight", "encoder.block.0.norm.weight", "encoder.table"}
    found = read_onnx_tensors([tmp_path / "a.onnx"], wanted)
    values = {name: tensor.read() for name, tensor in found.items()}
    assert set(values) == {*(f"encoder.block.0.{n}.weight" for n in ("q", "k", "v", "norm")), "encoder.table"}
    exact = (codes.astype(np.int32) - 7).astype(np.float32) * np.float32(0.1)
    np.testing.assert_array_equal(values["encoder.block.0.q.weight"], exact.T)
    np.testing.assert_array_equal(found["encoder.block.0.q.weight"].read_rows(1, 3), exact.T[1:3])
    np.testing.assert_array_equal(
        values["encoder.block.0.k.weight"], (columns.astype(np.float32) * arrays["onnx::MatMul_8_scale"]).T
    )
    np.testing.assert_array_equal(values["encoder.block.0.v.weight"], arrays["onnx::MatMul_9"].T)
    np.testing.assert_array_equal(values["encoder.table"], codes.astype(np.float32) * np.float32(0.5))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Symbol('s77', positive=True, integer=True)", True),
        ("2*s0 + Mod(s1, 4) - FloorDiv(s0, 2)", True),
        ("__import__('os').system('true')", False),
        ("Symbol('s77').func", False),
        ("eval('1')", False),
        ("[x for x in (1,)]", False),
        ("Symbol(f'{1}')", False),
        ("(" * 500, False),
        ("9" * 900, False),
    ],
)
def test_text_of_a_size_is_not_evaluated_before_it_is_known(text: str, plain: bool) -> None:
    assert is_plain_size(text) is plain


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (b'"use_pickle": false', b'"use_pickle": true ', "stored as a pickle"),
        (b"torch.ops.aten.gelu.default", b"torch._C.eval_whatever.aaaa", "operator"),
        (b"Symbol('s77', ", b"eval(('s77'), ", "size"),
        (b'\\"builtins.tuple\\"', b'\\"builtins.whole\\"', "arranged as"),
        (b'"guards_code": []', b'"guards_code": [1]', "Python code"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_that_could_run_code_is_refused(
    before: bytes, after: bytes, reason: str, tmp_path: Path
) -> None:
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(self.linear(x))

    sizes = {"x": {0: torch.export.Dim("n")}}
    torch.export.save(torch.export.export(Module(), (torch.ones(3, 8),), dynamic_shapes=sizes), tmp_path / "good.pt2")
    bad, changed = tmp_path / "bad.pt2", False
    with zipfile.ZipFile(tmp_path / "good.pt2") as old, zipfile.ZipFile(bad, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            data = old.read(name)
            found = before if before in data else before.replace(b"s77", b"s27")
            changed |= found in data
            new.writestr(name, data.replace(found, after))
    assert changed, "the archive has nothing to change"
    with pytest.raises(SourceError, match=reason):
        import_exported(bad)
