"""tests/gpu/run_all.sh as it stands: packed, installed into an environment of its own, run on an emulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.targets.cuda.target import CUDA_TARGETS

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(Path(__file__).parent)]
import emulated
import pack
import shapes

TARGET = "cuda:sm_80"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
PARTS = ("check_kernels", "check_nccl", "check_models", "time_models")


@pytest.mark.thorough
@pytest.mark.skipif(not emulated.available(), reason="no g++ here, or not an x86-64 processor")
def test_all_that_a_gpu_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer kernels and models, and a small shape; the script, its wheels and its table are the real ones."""
    folder, device, out = (tmp_path / name for name in ("pack", "device", "out"))
    device.mkdir()
    emulated.build(device)
    monkeypatch.setattr(shapes, "SEVEN_BILLION", {**shapes.SEVEN_BILLION, **SMALL, "num_key_value_heads": 2})
    monkeypatch.setattr(pack, "SHAPES", {"q4": pack.SHAPES["q4"]})
    with emulated.compiling():
        pack.write_kernels(folder / "kernels", CUDA_TARGETS[TARGET], 3, seeds=1, formats=("q4",))
        sources = dict(list(pack.tiny_models(tmp_path).items())[:1])
        pack.write_models(folder / "models", TARGET, sources)
        tokenizer_json = (next(iter(sources.values()))[0] / "tokenizer.json").read_bytes()
        pack.write_shapes(folder / "shapes", TARGET, tmp_path / "scratch", tokenizer_json)
    pack.write_wheels(folder / "wheels")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "LD_LIBRARY_PATH": str(device),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CHECKS": "--prompts 3 --longest 20 --tokens 6",
        "TIMES": "--prompt 64 --steps 4 --batches 1,2 --copy-bytes 100000",
    }
    done = subprocess.run(
        [ROOT / "tests" / "gpu" / "run_all.sh", folder, out],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "table.txt").read_text() == done.stdout
    assert all(json.loads((out / f"{part}.json").read_text()) for part in PARTS)
    assert "decode 2" in done.stdout
