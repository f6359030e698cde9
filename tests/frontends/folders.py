"""Changing a Hugging Face folder, and what open_model says to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from llmc.compiler.errors import LlmcError
from llmc.frontends.source import open_model


def edit(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; `...` removes one."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table = {k: v for k, v in (table | changes).items() if v is not ...}
    path.write_text(json.dumps(table))


def resave(folder: Path, **changes: Any) -> None:
    """Sets tensors of model.safetensors; `...` removes one."""
    path = folder / "model.safetensors"
    tensors = {k: v for k, v in ({**load_file(path)} | changes).items() if v is not ...}
    path.unlink()
    save_file(tensors, path)


def refusal(folder: Path) -> str:
    """The one line that open_model refuses the folder with."""
    with pytest.raises(LlmcError) as caught:
        open_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message
