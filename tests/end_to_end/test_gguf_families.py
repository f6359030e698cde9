"""Every architecture of GGUF files that llmc knows: a tiny random model of transformers, written as llama.cpp's
converter writes it, opened, compiled and compared. docs/families.md lists what is here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.frontends.gguf.architectures import ARCHITECTURES

sys.path.insert(0, str(Path(__file__).parent))
from family_check import EPS, check, variants
from folder_to_gguf import write_gguf
from gguf_cases import CASES, ENCODERS, TRANSLATORS
from gguf_experts import ungate
from reference import saved_reference

pytestmark = pytest.mark.usefixtures("plain_code")


def test_every_architecture_has_a_case() -> None:
    tested = {kind for kind, _, _ in (*CASES.values(), *TRANSLATORS.values())} | set(ENCODERS.values())
    assert tested == set(ARCHITECTURES)


VARIANTS = variants({case: kind for case, (kind, _, _) in CASES.items()})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough_if(case=lambda case: case in VARIANTS)
def test_architecture(case: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    kind, model_type, config = CASES[case]
    folder = tiny_model(model_type, seed=len(case), **{**EPS, **config})
    if kind == "deepseek":
        ungate(folder)
    write_gguf(folder, tmp_path / "tiny.gguf", kind)
    check(tmp_path / "tiny.gguf", saved_reference(folder), tmp_path / "tiny.llmc", len(case))
