"""Artifacts for CUDA run by llmc's runtime on an emulated device (tests/gpu/emulated.py), in processes of their own.

TVM's CUDA source, host code and runtime are the real ones; `tests/gpu/check_models.py` is what runs on a GPU too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.targets.cuda.target import CUDA_TARGETS

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "gpu"), str(Path(__file__).parent)]
import emulated
import pack
from test_cuda import MODELS, save_encoder
from tiny_translator import save_translator
from translator_cases import TRANSLATORS

pytestmark = pytest.mark.skipif(not emulated.available(), reason="no g++ here, or not an x86-64 processor")
TARGET = "cuda:sm_80"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the emulated device."""
    folder = emulated.build(tmp_path_factory.mktemp("device"))
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def compile_pair(source: Path, folder: Path, name: str) -> None:
    """NAME.cpu.llmc and NAME.cuda.llmc, of floats."""
    compile_model(source, folder / f"{name}.cpu.llmc", quant="f32", activations="f32")
    with emulated.compiling():
        compile_model(source, folder / f"{name}.cuda.llmc", quant="f32", target=TARGET)


def run(device: dict[str, str], *command: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=device | more,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen2_moe", "lfm2"])  # of test_cuda.py's
def test_a_model_on_a_device(
    model_type: str, device: dict[str, str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """One artifact for both: logits, tokens, and queries that give way in a small cache."""
    (tmp_path / "models").mkdir()
    config, quant, kv = MODELS[model_type]
    path, options = tmp_path / "models" / f"{model_type}.llmc", {"quant": quant, "kv": kv, "activations": "f32"}
    with emulated.compiling():
        compile_model(tiny_model(model_type, **config), path, target=f"{TARGET},cpu", **options)
    sizes = ["--prompts", 6, "--longest", 40, "--tokens", 18, "--seed", 1]
    done = run(device, ROOT / "gpu" / "check_models.py", tmp_path, "--json", tmp_path / "rows.json", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["model"] for row in rows] == [model_type]
    assert sum(sum(row["preempted"]) for row in rows) > 0, rows


@pytest.mark.thorough
def test_kernels_on_a_device(device: dict[str, str], tmp_path: Path) -> None:
    """What tests/gpu/pack.py packs of kernels, a few of them: every op, and a format."""
    with emulated.compiling():
        count = pack.write_kernels(tmp_path / "kernels", CUDA_TARGETS[TARGET], 7, seeds=1, formats=("q4",))
    done = run(device, ROOT / "gpu" / "check_kernels.py", tmp_path, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "rows.json").read_text())) == count > 20


@pytest.mark.thorough
def test_encoders_on_a_device(device: dict[str, str], tmp_path: Path) -> None:
    """Translations are the CPU's, of steps as they are and of captured ones. So are vectors of texts."""
    folder = tmp_path / "source"
    folder.mkdir()
    model_type, config = TRANSLATORS["T5"]
    save_translator(folder, model_type, config, seed=3)
    compile_pair(folder, tmp_path, "translator")
    save_encoder(tmp_path / "encoder", "ModernBERT")
    compile_pair(tmp_path / "encoder", tmp_path, "encoder")
    sources = [list(range(5, 5 + count)) for count in (20, 3, 20)]
    with llmc.load(tmp_path / "translator.cpu.llmc") as model:
        wanted = [list(model.generate(source, max_tokens=5, ignore_eos=True).ids) for source in sources]
    found = steps(device, tmp_path / "translator.cuda.llmc", f"""
    import json
    ids = [list(model.generate(source, max_tokens=5, ignore_eos=True).ids) for source in {sources}]
    print(json.dumps({{"ids": ids, "graphs": count(b"graphs")}}))
""")  # fmt: skip
    assert found["ids"] == wanted
    assert found["graphs"] > 0
    texts = ["a text", "one more, a little longer than that"]
    with llmc.load(tmp_path / "encoder.cpu.llmc") as model:
        vectors = model.embed(texts)
    found = steps(device, tmp_path / "encoder.cuda.llmc", f"""
    import json
    print(json.dumps({{"vectors": model.embed({texts}).tolist()}}))
""")  # fmt: skip
    np.testing.assert_allclose(found["vectors"], vectors, rtol=0, atol=float(np.abs(vectors).max()) * 3e-5)


@pytest.fixture(scope="module")
def artifact(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "tiny.llmc"
    with emulated.compiling():
        compile_model(tiny_model("llama"), path, quant="q8", target=TARGET)
    return path


STEPS = """
import ctypes, sys
import numpy as np
import llmc.runtime
from llmc.runtime.errors import LlmcError
count = ctypes.CDLL("libcudart.so.13").emulated_count
uploads = []
with llmc.runtime.load(sys.argv[1], cache_tokens=640, progress=lambda *said: uploads.append(said)) as model:
"""


def steps(device: dict[str, str], artifact: Path, body: str, **more: str) -> dict[str, Any]:
    """What a script prints as JSON of a model that it has loaded; `body` is indented under `with`."""
    done = run(device, "-c", STEPS + body, artifact, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_steps_that_come_again_are_captured(device: dict[str, str], artifact: Path) -> None:
    """Each size once; a captured step gives what it gives as it is, and asks the device for no memory."""
    found = steps(
        device, artifact, """
    import json
    from llmc.runtime.cuda import steps
    prompt = list(range(5, 40))
    plain, steps._CAPTURED_ROWS = steps._CAPTURED_ROWS, 0
    wanted = model.generate(prompt, max_tokens=12, ignore_eos=True).ids
    steps._CAPTURED_ROWS = plain
    before = count(b"captures"), count(b"graphs")
    mine = [model.generate(prompt, max_tokens=12, ignore_eos=True).ids for _ in range(2)]
    middle = count(b"launches"), count(b"allocations"), count(b"captures")
    mine.append(model.generate(prompt, max_tokens=12, ignore_eos=True).ids)
    after = count(b"launches"), count(b"allocations"), count(b"captures")
    print(json.dumps({"same": all(each == wanted for each in mine), "before": before,
                      "graphs": count(b"graphs"), "more": [b - a for a, b in zip(middle, after)],
                      "uploads": uploads}))
""")  # fmt: skip
    assert found["same"]
    assert found["before"] == [0, 0]
    assert found["graphs"] >= 30
    launches, allocations, captures = found["more"]
    assert (launches, captures, allocations) == (0, 0, 0)  # of the third: even what is left of the prompt
    stage, done, total = found["uploads"][-1]
    assert (stage, done) == ("upload", total)


def test_logits_stay_on_the_device_until_they_are_wanted(device: dict[str, str], artifact: Path) -> None:
    """A greedy answer takes none of them; who holds a row of a captured step reads its own after later steps."""
    found = steps(
        device, artifact, """
    import json
    from llmc.runtime.runner import Feed
    prompt, runner = list(range(5, 12)), model.runner
    vocab, to_host = runner.vocab, lambda: count(b"bytes to host")
    for _ in range(4):
        model.generate(prompt, max_tokens=6, ignore_eos=True)
    before = to_host()
    model.generate(prompt, max_tokens=6, ignore_eos=True)
    greedy = to_host() - before
    sequence, held = runner.new_sequence(), []
    for token in prompt * 4:  # steps of one row, most of them captured
        held.append(runner.step([Feed(sequence, [token])]))
    again = runner.new_sequence()
    whole = runner.step([Feed(again, prompt * 4, "all")])
    close = [float(np.abs(each.logits[0] - row).max()) for each, row in zip(held, whole.logits)]
    best = [int(each.logits[0].argmax()) == int(each.argmax[0]) for each in held]
    before = to_host()
    row = runner.step([Feed(again, [5, 6, 7], "all")]).row(1)
    told = to_host() - before
    row.logits
    print(json.dumps({"greedy": greedy, "row": 4 * vocab, "close": max(close), "best": all(best),
                      "one": to_host() - before - told, "graphs": count(b"graphs")}))
""")  # fmt: skip
    assert found["greedy"] < 6 * found["row"]
    assert found["one"] == found["row"]
    assert found["best"]
    assert found["close"] < 1e-5
    assert found["graphs"] > 0


def test_what_is_held_of_a_step_is_not_what_others_write(device: dict[str, str], artifact: Path) -> None:
    """Captured steps write where they were captured, which may be what TVM gave another step's logits later."""
    found = steps(
        device, artifact, """
    import json
    from llmc.runtime.cuda.device import the_device
    from llmc.runtime.runner import Feed
    runner, random = model.runner, np.random.default_rng(0)

    def step(sequences):
        return runner.step([Feed(each, [int(random.integers(5, 300))]) for each in sequences])

    two, one = [runner.new_sequence() for _ in range(2)], [runner.new_sequence()]
    for _ in range(4):
        step(two).logits
    held = []  # of steps of one row, as they are, captured, and launched; then of both sorts
    for number in range(12):
        for sequences in (one, two)[: 1 + number // 4]:
            output = step(sequences)
            held.append((output, output.top_ids.copy(), output.top_values.copy()))
    lent = len(the_device().lent)
    right = [bool((np.take_along_axis(each.logits, ids, 1) == values).all()) for each, ids, values in held]
    print(json.dumps({"right": all(right), "count": len(right), "lent": lent, "graphs": count(b"graphs"),
                      "captures": count(b"captures")}))
""")  # fmt: skip
    assert found["right"]
    assert found["count"] == 20
    assert found["lent"] == 1  # all others were read when a captured step was launched
    assert found["captures"] >= 2  # though outputs were held when they were captured
    assert found["graphs"] > 10


def test_more_pages_than_are_listed_beforehand(device: dict[str, str], artifact: Path) -> None:
    found = steps(
        device, artifact, """
    import json
    from llmc.runtime.cuda import steps
    prompt = list(range(5, 40))
    wanted = model.generate(prompt, max_tokens=4, ignore_eos=True).ids
    steps._INDEX_BYTES = 0
    print(json.dumps({"same": model.generate(prompt, max_tokens=4, ignore_eos=True).ids == wanted}))
""")  # fmt: skip
    assert found["same"]


def test_a_device_that_fails_or_is_too_small(device: dict[str, str], artifact: Path) -> None:
    """One line, exit code 1."""
    for bytes_, message in ((50_000, "no room for the weights"), (200_000, "no room for the KV cache")):
        done = run(device, "-m", "llmc", "run", artifact, "hello", "--raw", "--max-tokens", 4,
                   LLMC_EMULATED_BYTES=str(bytes_))  # fmt: skip
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    done = run(device, "-m", "llmc", "run", artifact, "hello", "--raw", "--max-tokens", 4, LLMC_EMULATED_CHIP="75")
    assert done.returncode == 1
    assert "cuda-sm_80 needs a device that runs sm_80 (here: sm_75)" in done.stderr
    done = run(device, "-m", "llmc", "run", artifact, "hello", "--raw", "--max-tokens", 4, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ids"]) == 4
