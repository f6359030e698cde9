"""docs/threats.md names a test for each threat, and each is there; and the threats that no reader's own tests have."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.formats import FORMATS, OFFERED, BlockFormat, dequantize

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
from readers import READERS

FOLDERS = ("compiler", "frontends", "passes", "runtime", "targets")
CALLS = {"eval", "exec", "compile", "__import__"}
RUNNERS = {"pickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "joblib"}
PLACE = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def _page(root: Path) -> str:
    return (root / "docs" / "threats.md").read_text(encoding="utf-8")


def test_every_test_on_the_page_exists(root: Path) -> None:
    places = PLACE.findall(_page(root))
    assert len(places) > 40
    for file, name in places:
        text = (root / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{file} has no {name}"


def test_every_item_is_on_the_page(root: Path) -> None:
    page = _page(root)
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(number) for number in range(1, 16)]
    fuzzed = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert set(fuzzed) <= set(READERS)
    assert len(set(fuzzed)) == len(fuzzed) > 10


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_evaluates_text_or_unpickles(root: Path, folder: str) -> None:
    found = []
    for path in (root / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in CALLS:
                found.append(f"{path.name}:{node.lineno} {called.id}")
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name} {name}" for name in modules if name.split(".")[0] in RUNNERS]
    assert not found


# Groups of which a scale is zero, below float16 or float32's normal numbers, or as large as float32 has them.
ROWS = {
    "zeros": np.zeros(512, np.float32),
    "one of many zeros": np.eye(1, 512, 100, dtype=np.float32)[0],
    "subnormal": np.full(512, 1e-40, np.float32) * np.sign(np.arange(512) % 3 - 0.5).astype(np.float32),
    "below float16": np.linspace(-1e-9, 1e-9, 512, dtype=np.float32),
    "one value": np.full(512, 0.37, np.float32),
    "far apart": np.where(np.arange(512) % 7, 1e-6, 50.0).astype(np.float32),
}


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.parametrize("row", ROWS)
def test_strange_groups_are_stored_finite(name: str, row: str) -> None:
    format = FORMATS[name]
    weight = np.stack([ROWS[row], -ROWS[row]] * 8)
    with np.errstate(all="raise", under="ignore"):
        if isinstance(format, BlockFormat):
            values = dequantize(format, format.quantize(weight))[:, : weight.shape[1]]
        else:
            values = format.unpack(format.pack(weight), *weight.shape)
    assert np.isfinite(values).all()
    assert np.abs(values - weight).max() <= np.abs(weight).max()
