"""How many bytes of weights a step reads, by an artifact's own account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.cli_bench import weight_bytes_per_step

SIZES = {"embedding": 1000, "layers.0.q": 10, "layers.0.experts.gate": 800, "layers.0.shared.gate": 30, "head": 500}


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    """Of an artifact in tmp_path that has weights of these sizes, eight experts, two a row, and a head of its own."""
    header, start = {}, 0
    for name, size in SIZES.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    (tmp_path / "weights").write_bytes(len(text).to_bytes(8, "little") + text)
    return {
        "task": "generate", "spec": {"head": {"tied": False}, "experts": {"count": 8, "used": 2}},
        "weights": {"file": "weights", "order": list(SIZES)},
    }  # fmt: skip


def test_of_experts_those_count_that_rows_use(tmp_path: Path, manifest: dict[str, Any]) -> None:
    assert weight_bytes_per_step(tmp_path, manifest) == 10 + 800 / 4 + 30 + 500
    assert weight_bytes_per_step(tmp_path, manifest, rows=2) == 10 + 800 * (1 - 0.75**2) + 30 + 500
    assert weight_bytes_per_step(tmp_path, manifest, rows=1000) == sum(SIZES.values()) - SIZES["embedding"]


def test_without_experts_rows_do_not_count(tmp_path: Path, manifest: dict[str, Any]) -> None:
    for experts in (None, {"count": 0, "used": 0}):
        manifest["spec"]["experts"] = experts
        assert weight_bytes_per_step(tmp_path, manifest, rows=3) == 10 + 800 + 30 + 500
    manifest["spec"]["head"]["tied"] = True
    assert weight_bytes_per_step(tmp_path, manifest) == sum(SIZES.values())
