"""Exported graphs: an ONNX file or a program of torch.export, run by the thin runtime, against its reference.

Arrays of any number of rows go through one compiled graph; what does not fit is refused by name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from onnx import TensorProto

import llmc
from llmc.cli import command
from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.loading.large_pages import LargePages

sys.path.insert(0, str(Path(__file__).parent))
import graph_cases

Arrays = dict[str, NDArray[Any]]


def ids(batch: int, length: int) -> Arrays:
    return {"ids": np.random.default_rng(batch).integers(0, 50, (batch, length))}


def floats(*shape: int, name: str = "x") -> Arrays:
    return {name: np.random.default_rng(shape[0]).standard_normal(shape).astype(np.float32)}


def session_of(file: Path, *, plain: bool = False) -> onnxruntime.InferenceSession:
    """onnxruntime's own, with sums of bytes that are exact; `plain`: the graph as it is.

    Without the entry it adds pairs of products in 16 bits, which do not hold them, where a CPU has AVX2 and no VNNI:
    https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(file), options)


CASES: dict[str, tuple[Callable[[Path], Path], list[Arrays]]] = {
    "layers": (graph_cases.layers, [ids(1, 1), ids(3, 17)]),
    "shapes": (graph_cases.shapes, [floats(1, 1, 24), floats(2, 9, 24)]),
    "pictures": (graph_cases.pictures, [floats(1, 3, 12, 12), floats(5, 3, 12, 12)]),
    "bytes": (graph_cases.bytes_of_weights, [floats(1, 300), floats(7, 300)]),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Each case's ONNX file and its artifact."""
    folder = tmp_path_factory.mktemp("graphs")
    files = {name: write(folder / f"{name}.onnx") for name, (write, _) in CASES.items()}
    return {name: (file, compile_model(file, folder / f"{name}.llmc").path) for name, file in files.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_computes_what_onnxruntime_does(name: str, made: dict[str, tuple[Path, Path]]) -> None:
    file, artifact = made[name]
    session = session_of(file)
    graph = llmc.load_graph(artifact)
    for arrays in CASES[name][1]:
        expected = session.run(None, arrays)
        outputs = graph.run(arrays)
        assert list(outputs) == [output.name for output in session.get_outputs()]
        for (title, value), wanted in zip(outputs.items(), expected, strict=True):
            assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape), title
            np.testing.assert_allclose(value, wanted, atol=1e-4, rtol=1e-4, err_msg=f"{name} {title}")


def test_products_of_integers_are_exact(made: dict[str, tuple[Path, Path]]) -> None:
    file, artifact = made["bytes"]
    arrays = floats(20, 300)
    (expected,) = session_of(file).run(["sums"], arrays)
    np.testing.assert_array_equal(llmc.load_graph(artifact).run(arrays)["sums"], expected)


def test_weights_are_told_of_its_calls(made: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(LargePages, "worked", lambda pages, seconds: told.append(seconds))
    graph = llmc.load_graph(made["bytes"][1])
    for _ in range(2):
        graph.run(floats(20, 300))
    assert len(told) == 2
    assert min(told) > 0


def test_a_table_answers_nan_beyond_its_end(made: dict[str, tuple[Path, Path]]) -> None:
    outputs = llmc.load_graph(made["layers"][1]).run({"ids": np.array([[3, 50], [2**40, -51]])})
    assert np.isfinite(outputs["y"][0, 0]).all()
    assert np.isnan(outputs["y"][0, 1]).all()
    assert np.isnan(outputs["y"][1]).all()


def test_matrices_take_a_format(tmp_path: Path, made: dict[str, tuple[Path, Path]]) -> None:
    result = compile_model(made["layers"][0], tmp_path / "q8.llmc", quant="q8")
    assert set(result.formats.values()) == {"q8"}
    exact, arrays = llmc.load_graph(made["layers"][1]), ids(2, 5)
    np.testing.assert_allclose(llmc.load_graph(result.path).run(arrays)["y"], exact.run(arrays)["y"], atol=2e-3)


def test_the_thin_runtime_runs_it_alone(made: dict[str, tuple[Path, Path]]) -> None:
    code = (
        "import sys, numpy as np, llmc.runtime\n"
        f"out = llmc.runtime.load_graph({str(made['layers'][1])!r}).run({{'ids': np.ones((2, 3), np.int64)}})\n"
        "assert out['y'].shape == (2, 3, 70)\n"
        "assert not {'tvm', 'onnx', 'torch', 'llmc.compiler'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_compiles_are_the_same_bytes(tmp_path: Path, made: dict[str, tuple[Path, Path]]) -> None:
    again = compile_model(made["shapes"][0], tmp_path / "shapes.llmc").path
    assert (again / "manifest.json").read_bytes() == (made["shapes"][1] / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({}, "no input 'x'"),
        ({"x": np.zeros((2, 3, 24), np.float32), "y": np.zeros(1)}, "unknown input 'y'"),
        ({"x": np.zeros((2, 3, 24))}, "'x' is float64, wanted float32"),
        ({"x": np.zeros((2, 3, 25), np.float32)}, r"'x' has shape \[2, 3, 25\], wanted \[n, t, 24\]"),
        ({"x": np.zeros((0, 3, 24), np.float32)}, "has shape"),
        ({"x": np.zeros((3, 24), np.float32)}, "has shape"),
        ({"x": np.zeros((1, 33, 24), np.float32)}, r"min\(t, 32\) has to be t"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: Arrays, reason: str, made: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(RequestError, match=reason):
        llmc.load_graph(made["shapes"][1]).run(arrays)


def test_the_command(tmp_path: Path, made: dict[str, tuple[Path, Path]]) -> None:
    run, artifact = CliRunner().invoke, str(made["layers"][1])
    np.save(tmp_path / "in.npy", ids(2, 3)["ids"])
    given = ["run", artifact, "--input", f"ids={tmp_path / 'in.npy'}"]
    done = run(command, [*given, "--json"])
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)["outputs"]
    expected = llmc.load_graph(artifact).run(ids(2, 3))
    np.testing.assert_allclose(values["z"]["values"], expected["z"], rtol=1e-6)
    assert run(command, [*given, "--output-dir", str(tmp_path)]).exit_code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected["y"])
    shown = run(command, ["inspect", artifact]).stdout
    assert "ids int64 [batch, length]" in shown
    assert "LayerNormalization" in shown
    assert "intact" in run(command, ["verify", artifact]).stdout
    compiled = ["compile", str(made["layers"][0]), "-o", str(tmp_path / "a.llmc")]
    for wrong, code, reason in (
        (["run", artifact, "hello"], 1, "a graph, not a model of text"),
        (["run", artifact, "--input", "ids"], 2, "NAME=FILE.npy"),
        (["run", artifact, "--input", f"ids={made['layers'][0]}"], 1, "not a .npy file"),
        (["run", artifact, "--input", f"other={tmp_path / 'in.npy'}"], 1, "no input 'ids'"),
        ([*compiled, "--bpw", "4"], 1, "--bpw: not for a graph"),
        ([*compiled, "--layer-groups", "2"], 1, "--layer-groups: not for a graph"),
    ):
        done = run(command, wrong)
        assert done.exit_code == code, done.output
        assert reason in done.stderr


def test_a_changed_manifest_or_library_is_refused(tmp_path: Path, made: dict[str, tuple[Path, Path]]) -> None:
    import shutil

    copy = tmp_path / "copy.llmc"
    shutil.copytree(made["pictures"][1], copy)
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace('"float32"', '"float64"', 1))
    with pytest.raises(ArtifactError, match="damaged"):
        llmc.load_graph(copy)
    (copy / "manifest.json").write_text(text)
    library = next((copy / "lib").glob("cpu-*.so"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged"):
        llmc.load_graph(copy)


def node(op: str, *takes: str, **attrs: Any) -> Any:
    return (op, takes, ["y"], attrs)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([("Bernoulli", ["x"], ["a"], {}), ("Celu", ["a"], ["b"], {}), node("Det", "b")], "Bernoulli, Celu, Det"),
        ([("NonZero", ["x"], ["a"], {}), node("Cast", "a", to=1)], "depends on values"),
        ([("Cast", ["x"], ["a"], {"to": 7}), ("Reshape", ["a", "a"], ["y"], {})], "its shape is computed from values"),
        ([("TopK", ["x", "k"], ["y", "i"], {})], "no code for|shape"),
        ([node("Add", "x", "later"), ("Neg", ["y"], ["later"], {})], "before anything gives it"),
        ([("ConstantOfShape", ["huge"], ["a"], {}), node("Add", "x", "a")], "wanted at most"),
    ],
)
def test_what_cannot_be_compiled_is_named(nodes: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    made = [onnx.helper.make_node(op, list(takes), list(gives), **attrs) for op, takes, gives, attrs in nodes]
    constants = {"k": np.array([2], np.int64), "huge": np.array([2**40], np.int64)}
    graph = onnx.helper.make_graph(
        made, "graph", [onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", graph_cases.OPSET)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(LlmcError, match=reason):
        compile_model(path, tmp_path / "a.llmc")


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = torch.nn.Linear(24, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 64)
        self.register_buffer("shift", torch.randn(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.nn.functional.gelu(self.norm(self.up(x)))) + self.shift
        return torch.softmax(y, -1), y.mean(1)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "module.pt2"
    sizes = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(Module().eval(), (torch.randn(3, 5, 24),), dynamic_shapes=sizes)
    torch.export.save(program, path)
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_torch_export(exported: Path, tmp_path: Path) -> None:
    graph = llmc.load_graph(compile_model(exported, tmp_path / "a.llmc").path)
    assert (graph.inputs[0].name, graph.inputs[0].shape[1:]) == ("x", (5, 24))
    for batch in (1, 6):
        x = floats(batch, 5, 24)["x"]
        with torch.no_grad():
            expected = Module().eval()(torch.from_numpy(x))
        for value, wanted in zip(graph.run({"x": x}).values(), expected, strict=True):
            np.testing.assert_allclose(value, wanted.numpy(), atol=1e-5)


@pytest.mark.model
def test_a_real_graph(minilm_onnx: Path, tmp_path: Path) -> None:
    graph = llmc.load_graph(compile_model(minilm_onnx, tmp_path / "a.llmc").path)
    session = onnxruntime.InferenceSession(str(minilm_onnx))
    for batch, length in ((1, 7), (3, 40)):
        tokens = np.random.default_rng(batch).integers(5, 30000, (batch, length))
        mask = np.ones_like(tokens)
        mask[0, length - 2 :] = 0
        arrays = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(tokens)}
        (expected,) = session.run(None, arrays)
        np.testing.assert_allclose(graph.run(arrays)["last_hidden_state"], expected, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.model
def test_a_real_graph_of_integers(flan_t5: Path, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits, so that the last bit of a sum can move an output by 0.02: docs/graphs.md."""
    path = flan_t5 / "encoder.onnx"
    graph = llmc.load_graph(compile_model(path, tmp_path / "a.llmc").path)
    sessions = [session_of(path), session_of(path, plain=True)]
    for batch, length in ((1, 7), (2, 20)):
        tokens = np.random.default_rng(batch).integers(5, 30000, (batch, length))
        arrays = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        own = graph.run(arrays)["last_hidden_state"]
        expected = [session.run(None, arrays)[0] for session in sessions]
        apart = np.abs(expected[0] - expected[1]).max()
        assert min(np.abs(own - value).max() for value in expected) < max(1e-4, 4 * apart)
        assert (own * expected[0]).sum() > 0.998 * np.linalg.norm(own) * np.linalg.norm(expected[0])
