"""`llmc plan` as it is called: its tables, its JSON, its refusals."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from llmc import cli_bench, measure_devices
from llmc.cli import command
from llmc.cli_compile import compile_command
from llmc.compiler.spec import example, to_toml
from llmc.compiler.spec.blocks import Attention, Sizes
from llmc.passes.plan.devices import read_devices

ROOT = Path(__file__).resolve().parents[2]
TWO, GPUS = (str(ROOT / "examples" / "devices" / f"{name}.toml") for name in ("two_cores", "eight_gpus"))


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """A spec of the 7B shape."""
    sizes = Sizes(vocab=32000, hidden=4096, layers=32, ffn=11008, context=4096)
    attention = Attention("gqa", heads=32, kv_heads=32, head_dim=128, scale=1 / math.sqrt(128))
    path = tmp_path / "seven.toml"
    path.write_text(to_toml(replace(example(), name="seven", sizes=sizes, attention=attention)))
    return str(path)


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(command, ["plan", *arguments])


def _json(*arguments: str) -> Any:
    found = _plan(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_the_table_marks_one_and_gives_its_command(spec: str) -> None:
    found = _plan(spec, "--devices", GPUS, "--quant", "q8", "--for", "throughput", "--queries", "64")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0].startswith("seven: 32 layers, width 4096, q8 weights (7.")
    marked = [line for line in lines if line.startswith("*")]
    assert len(marked) == 2  # in the table, and in words
    words = shlex.split(lines[-1])
    assert words[:3] == ["llmc", "compile", "seven.toml"]
    context = compile_command.make_context("compile", words[2:])  # it is what compile takes
    assert context.params["devices"] is None or context.params["devices"].startswith("cuda:0")
    assert context.params["target"] == "cuda:sm_XX"  # for the user to say
    assert "refused" not in found.stdout


def test_json_has_what_the_table_has(spec: str) -> None:
    found = _json(spec, "--devices", TWO, "--quant", "c3")
    assert found["best"] in found["strategies"]
    assert {each["devices"] for each in found["strategies"]} == {"0", "0;1", "0&1"}
    best = found["best"]
    assert best["token_s"] == min(each["token_s"] for each in found["strategies"])
    assert all(each["needs"] <= each["has"] for each in best["memory"])
    assert found["workload"]["queries"] == 8


def test_what_is_refused_says_why(spec: str) -> None:
    found = _plan(spec, "--devices", TWO, "--quant", "q8", "--queries", "3", "--prompt-tokens", "8000")
    assert found.exit_code == 0, found.output
    assert "refused:" in found.stdout
    assert "  0: device 0 needs " in found.stdout
    assert ", has 11.90 GB" in found.stdout


def test_nothing_fits(spec: str) -> None:
    found = _plan(spec, "--devices", TWO, "--quant", "f32")
    assert found.exit_code == 1
    assert found.stderr.startswith("llmc: nothing fits; the nearest is 0")
    assert "GB short: device" in found.stderr
    assert found.stderr.count("\n") == 1


def test_layers_go_to_the_host(spec: str, tmp_path: Path) -> None:
    small = Path(GPUS).read_text().replace("count = 8", "count = 1").replace("memory_gb = 80", "memory_gb = 8")
    (tmp_path / "small.toml").write_text(small)
    arguments = (spec, "--devices", str(tmp_path / "small.toml"), "--quant", "q8", "--queries", "4")
    found = _json(*arguments)
    assert found["best"]["offload"]["host"] == "cpu:0"
    assert "host offload" in _plan(*arguments).stdout
    assert ("--devices" in found["compile"]) == (found["best"]["offload"]["layers"] > 0)


def test_other_plans(spec: str, tmp_path: Path) -> None:
    ring = _json(spec, "--devices", GPUS, "--ring", "--prompt-tokens", "20000")
    assert [each["best"] for each in ring["plans"]].count(True) == 1
    assert "keys both ways" in _plan(spec, "--devices", GPUS, "--ring", "--prompt-tokens", "20000").stdout
    np.savez(tmp_path / "t.npz", trace=np.zeros((2, 3, 1), int))
    found = _plan(spec, "--devices", GPUS, "--routing", str(tmp_path / "t.npz"))
    assert found.exit_code == 1
    assert "no experts" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "Missing argument 'MODEL'"),
        (("m.toml",), "Missing option '--devices'"),
        (("m.toml", "--devices", TWO, "--first-ms", "3"), "go together"),
        (("m.toml", "--devices", TWO, "--first-ms", "nan", "--token-ms", "1"), "above 0"),
        (("m.toml", "--devices", TWO, "--ring", "--routing", "x"), "ask for one"),
        (("m.toml", "--devices", TWO, "-o", "x"), "-o is for"),
        (("m.toml", "--devices", TWO, "--artifact", "x"), "--artifact is for --measure"),
        (("--measure",), "wants -o"),
        (("m.toml", "--measure", "-o", "x"), "takes no MODEL"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], reason: str) -> None:
    found = _plan(*arguments)
    assert found.exit_code == 2
    assert reason in found.stderr


def test_files_that_are_not_there(spec: str, tmp_path: Path) -> None:
    found = _plan(spec, "--devices", str(tmp_path / "none.toml"))
    assert found.exit_code == 1
    assert "cannot read the devices: no such file" in found.stderr
    assert _plan(str(tmp_path / "none.gguf"), "--devices", TWO).exit_code == 1


def test_measuring_writes_what_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rate(case: dict[str, Any]) -> dict[str, Any]:
        return {"read_bytes_per_s": 10e9 * min(case["threads"], 1.5)}

    monkeypatch.setattr(cli_bench, "worker", rate)
    found = {"latency_s": 5e-6, "bytes_per_s": 4e9, "wake_s": 2e-4, "unsteady": 0.1}
    monkeypatch.setattr(measure_devices, "messages", lambda: found)
    output = tmp_path / "here.toml"
    found = _plan("--measure", "-o", str(output))
    assert found.exit_code == 0, found.output
    devices = read_devices(output.read_text())
    assert all(device.read == 10e9 and device.ops["f32"] > 1e8 for device in devices.devices)
    if len(devices.devices) > 1:
        assert devices.nodes[0].link.latency_s == pytest.approx(5e-6)
        assert devices.nodes[0].together == 15e9
    again = _plan("--measure", "-o", str(output))
    assert again.exit_code == 1
    assert "is there already" in again.stderr


def test_an_artifact_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "worker", lambda case: {"read_bytes_per_s": 1e9})
    monkeypatch.setattr(measure_devices, "messages", lambda: None)
    found = _plan("--measure", "-o", str(tmp_path / "x.toml"), "--artifact", str(tmp_path))
    assert found.exit_code == 1
    assert "no artifact" in found.stderr
    assert not (tmp_path / "x.toml").exists()


def test_an_artifact_is_planned_with_its_formats(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    from llmc.compiler.driver import compile_model

    path = tmp_path / "tiny.llmc"
    compile_model(tiny_llama(num_hidden_layers=1), path, quant="q8")
    found = _json(str(path), "--devices", TWO)
    assert found["quant"] == "q8"
    weights = json.loads((path / "manifest.json").read_text())["files"]["weights.safetensors"]["bytes"]
    own = next(each for each in found["strategies"] if each["devices"] == "0")["memory"][0]["weights"]
    assert own == pytest.approx(weights, rel=0.05)  # its header, and gaps between tensors
    assert "--quant: an artifact has" in _plan(str(path), "--devices", TWO, "--quant", "q4").stderr
