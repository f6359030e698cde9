"""Artifacts for several devices: what is in them, and that workers with MPI between them answer as one device does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import llmc
from llmc.cli_inspect import inspect_command
from llmc.compiler.driver import compile_model, sources
from llmc.compiler.driver.shares import ShareSources
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, dequantize
from llmc.frontends.source import open_model
from llmc.frontends.tensor import Tensor
from llmc.passes.partition.part import WeightShare
from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading.artifact import inspect, verify
from llmc.runtime.loading.device_manifest import read_device_manifest

pytestmark = pytest.mark.usefixtures("plain_code")

MPIRUN = Path(sys.executable).with_name("mpirun")


@pytest.fixture(scope="module")
def folder(tiny_llama: Callable[..., Path]) -> Path:
    """A random model of three layers."""
    return tiny_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def by_tensor(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its artifact for two devices that share every layer."""
    path = tmp_path_factory.mktemp("devices") / "two.llmc"
    compile_model(folder, path, quant="q8", devices="0&1")
    return path


def test_each_device_has_files_of_its_own(by_tensor: Path) -> None:
    verify(by_tensor)
    facts = inspect(by_tensor)["devices"]
    assert facts["placement"] == "0&1"
    assert [each["weights"]["file"] for each in facts["ranks"]] == ["weights.0.safetensors", "weights.1.safetensors"]
    first, second = (read_device_manifest(by_tensor, (rank, 2)) for rank in (0, 1))
    assert first.variants[0].file.endswith(".0.so")
    assert second.variants[0].file.endswith(".1.so")
    assert first.groups == ((0, 1),)
    assert first.kv.layers == 3
    assert {second.weights, second.variants[0].file} == first.elsewhere


def test_a_stage_has_its_layers(folder: Path, tmp_path: Path) -> None:
    compile_model(folder, tmp_path / "m.llmc", quant="f32", devices="0;1", split="2:1")
    manifests = [read_device_manifest(tmp_path / "m.llmc", (rank, 2)) for rank in (0, 1)]
    assert [each.kv.layers for each in manifests] == [2, 1]
    assert [each.kv.groups[0].layers for each in manifests] == [(0, 1), (0,)]
    assert [each.ranks[each.rank].outputs["step"] for each in manifests] == [(), (0, 1, 2, 3)]


def test_inspect_says_what_each_device_holds(by_tensor: Path, tmp_path: Path) -> None:
    from llmc.compiler.artifact import write_manifest

    facts = inspect(by_tensor)
    for rank, each in enumerate(facts["devices"]["ranks"]):
        assert each["weight_bytes"] == (by_tensor / f"weights.{rank}.safetensors").stat().st_size
        assert not each["on_host"]
    whole = facts["kv"]
    tokens = [each["kv_token_bytes"] for each in facts["devices"]["ranks"]]
    assert sum(tokens) == whole["layers"] * 2 * whole["kv_heads"] * whole["head_dim"] * 2  # of bf16
    # Beside a device with memory of its own, layers on a CPU are in the host's.
    shutil.copytree(by_tensor, tmp_path / "mixed.llmc")
    raw = json.loads((by_tensor / "manifest.json").read_text())
    raw["devices"]["placement"] = "cuda:0&cpu:0"
    raw["devices"]["ranks"][0]["device"], raw["devices"]["ranks"][1]["device"] = "cuda:0", "cpu:0"
    write_manifest(tmp_path / "mixed.llmc", {k: v for k, v in raw.items() if k not in ("files", "manifest_sha256")})
    assert [each["on_host"] for each in inspect(tmp_path / "mixed.llmc")["devices"]["ranks"]] == [False, True]
    shown = CliRunner().invoke(inspect_command, [str(tmp_path / "mixed.llmc")]).output
    assert "2: cuda:0&cpu:0, by tensor" in shown
    assert re.search(r"\n1 +0 +cpu:0 +0-2 +1 +\S+ \S+ +\S+ \S+ +lib/\S+\.1\.so +host\n", shown)


def test_one_process_refuses_it(by_tensor: Path) -> None:
    with pytest.raises(ArtifactError, match=r"compiled for 2 devices \(0&1\).*mpirun -n 2 llmc run two.llmc"):
        llmc.load(by_tensor)


def test_what_is_wrong_with_devices_is_named(by_tensor: Path, tmp_path: Path) -> None:
    from llmc.compiler.artifact import write_manifest

    shutil.copytree(by_tensor, tmp_path / "bad.llmc")
    raw = json.loads((by_tensor / "manifest.json").read_text())
    raw["devices"]["ranks"][1] |= {"layers": [0, 9, 1], "outputs": {}}
    write_manifest(tmp_path / "bad.llmc", {k: v for k, v in raw.items() if k not in ("files", "manifest_sha256")})
    with pytest.raises(ArtifactError, match=r"ranks\[1\].layers: wanted some of 0..2.*ranks\[1\].outputs"):
        verify(tmp_path / "bad.llmc")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"devices": "0&1", "check": True}, "--check"),
        ({"devices": "0&1", "layer_groups": 2}, "--layer-groups"),
        ({"split": "1:1"}, "--split"),
    ],
)
def test_wishes_that_cannot_be_met(options: dict[str, Any], reason: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match=reason):
        compile_model(folder, tmp_path / "no.llmc", **options)


class _Model:
    """Weights of a format, as a compile finds them."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.weights = weights

    def read(self, name: str) -> Any:
        return self.weights[name]

    def quantized(self, format: Any, names: tuple[str, ...]) -> Any:
        return format.quantize(np.concatenate([self.weights[name] for name in names]))

    def in_pieces(self, kind: Any, names: tuple[str, ...]) -> bool:
        return False

    def count(self, count: int) -> None:
        pass


@pytest.mark.parametrize("format", ["q8", "q4", "c4", "c3h", "r4"])
def test_a_share_has_the_codes_of_the_whole(format: str) -> None:
    rng, kind = np.random.default_rng(0), FORMATS[format]
    weights = {name: rng.standard_normal((48, 160)).astype(np.float32) for name in ("a", "b")}
    whole = dequantize(kind, _Model(weights).quantized(kind, ("a", "b")))[:, :160]
    rows = {name: WeightShare(name, (48, 160), 0, ((16, 32), (0, 3))) for name in weights}
    columns = {name: WeightShare(name, (48, 160), 1, ((64, 160),)) for name in weights}
    taken = [*range(16, 32), *range(3)]
    for shares, expected in (
        (rows, whole[[*taken, *(48 + row for row in taken)]]),
        (columns, np.ascontiguousarray(whole[:, 64:])),
    ):
        packed = ShareSources(_Model(weights), shares).pack(format, ("a", "b"))  # type: ignore[arg-type]
        np.testing.assert_array_equal(kind.unpack(packed, *expected.shape), expected)


@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q3h", "c4", "r4"])
def test_shares_read_in_pieces_are_packed_as_one(format: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several matrices, columns with the codes of their rows or, where they cut blocks, their own, and all."""
    with open_model(folder) as model:
        read, cut = sources.ModelSources(model), dict[str, Any]()
        for name, axis, ranges in (
            ("q", 0, ((8, 24), (0, 5))), ("k", 0, ((3, 17),)), ("down", 1, ((64, 128),)), ("o", 1, ((3, 40), (41, 60))),
        ):  # fmt: skip
            shape = model.tensors[f"layers.0.{name}"].shape
            cut[f"layers.0.{name}"] = WeightShare(f"layers.0.{name}", shape, axis, ranges)
        cut["embedding"] = WeightShare("embedding", (shape := model.tensors["embedding"].shape), 0, ((0, shape[0]),))
        groups = [("layers.0.q", "layers.0.k"), ("layers.0.down",), ("layers.0.o",), ("embedding",)]
        found = []
        for piecewise in (False, True):
            if piecewise:
                monkeypatch.setattr(sources, "_PIECE", 1)  # a tile
                monkeypatch.setattr(Tensor, "read", None)  # no matrix as a whole
            else:
                monkeypatch.setattr(read, "in_pieces", lambda kind, names: False)
            found.append([ShareSources(read, cut).pack(format, names) for names in groups])
            monkeypatch.undo()
        for whole, pieces in zip(*found, strict=True):
            np.testing.assert_array_equal(pieces, whole)


@pytest.mark.mpi
def test_workers_answer_as_one_device(folder: Path, tmp_path: Path) -> None:
    """However they are started; test_device_matrix.py has other models and placements."""
    options = ["abc", "--raw", "--max-tokens", "40", "--temperature", "0", "--threads", "1", "--json"]
    compile_model(folder, tmp_path / "one.llmc", quant="f32")
    compile_model(folder, tmp_path / "many.llmc", quant="f32", devices="0&1;2", split="1:2:1")
    found = []
    llmc_run = [sys.executable, "-m", "llmc", "run"]
    for command in (
        [*llmc_run, str(tmp_path / "one.llmc"), *options],
        [str(MPIRUN), "-n", "3", *llmc_run, str(tmp_path / "many.llmc"), *options],
        [*llmc_run, "--devices", str(tmp_path / "many.llmc"), *options],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["ids"])
    assert len(found[0]) >= 1
    assert found == [found[0]] * 3


@pytest.mark.mpi
def test_more_workers_than_devices_are_refused_by_each(by_tensor: Path) -> None:
    command = [str(MPIRUN), "-n", "3", sys.executable, "-m", "llmc", "run", str(by_tensor), "abc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("llmc: ")]  # mpirun ends the slower ones
    assert lines
    assert all("compiled for 2 devices (0&1), and this is a run of 3" in line for line in lines)


@pytest.mark.mpi
def test_stages_work_at_once_and_queries_say_what_they_say_alone(folder: Path, tmp_path: Path) -> None:
    compile_model(folder, tmp_path / "two.llmc", quant="q8", devices="0;1", split="2:1")
    case = Path(__file__).with_name("concurrent_case.py")
    command = [str(MPIRUN), "-n", "2", sys.executable, str(case), str(tmp_path / "two.llmc")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["together"] == found["alone"]
    assert [len(answers) for answers in found["alone"]] == [1, 1, 1, 2, 1, 1]
    order = {(what, number): place for place, (what, number) in enumerate(found["events"])}
    waits = [order["wait", number] for number in range(len(order) // 2)]
    under_way = [waits[number] > order["begin", number + 1] for number in range(len(waits) - 1)]
    assert under_way[:40] == [True] * 40  # while stage 1 has a step, stage 0 has another
