"""The examples in docstrings are true. `pytest --doctest-modules` would import the files twice."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _modules() -> list[str]:
    names = []
    for folder in ("compiler", "frontends", "passes", "runtime", "targets"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "__main__.py":
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if parts[:2] == ("compiler", "llmc") else ("llmc", *parts)
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("name", _modules())
def test_docstring_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
