"""Sessions of a compiled model, layers with windows and 8-bit pages: what was saved goes on with equal bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.cache.session_file import load_session, save_session
from llmc.runtime.loading.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("plain_code")

_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
IDS = [(11 * n + 3) % 60 for n in range(70)]


@pytest.fixture(scope="module")
def artifact(tiny_model: Callable[..., Path], tmp_path_factory: Any) -> Path:
    target = tmp_path_factory.mktemp("sessions") / "tiny.llmc"
    return Path(compile_model(tiny_model("gemma3_text", **_WINDOWS), target, quant="q8", kv="q8").path)


def test_a_sequence_goes_on_in_another_process_s_pages(artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(artifact)
    with llmc.load(artifact, threads=1) as here, llmc.load(artifact, threads=1) as there:
        sequence = here.runner.new_sequence()
        here.runner.prefill([(sequence, IDS)])
        save_session(tmp_path / "a", here.runner.pool, sequence, IDS, manifest)
        there.runner.step([(there.runner.new_sequence(), IDS[:40])])  # so that its pages are others
        twin = load_session(tmp_path / "a", there.runner.pool, manifest).sequence
        for token in (5, 6, 7):
            wanted = here.runner.step([(sequence, [token])]).logits.copy()
            assert (there.runner.step([(twin, [token])]).logits == wanted).all()


def test_a_model_goes_on_with_equal_tokens(artifact: Path, tmp_path: Path) -> None:
    options = {"max_tokens": 12, "ignore_eos": True}
    with llmc.load(artifact, threads=1) as model:
        wanted = model.generate([*IDS, 9], **options)
        model.save_session(tmp_path / "a", IDS, note="n")
    with llmc.load(artifact, threads=1) as model:
        assert model.load_session(tmp_path / "a") == (IDS, "n")
        assert model.generate([*IDS, 9], **options).ids == wanted.ids
        assert model.engine.stats.hit_tokens == 64
