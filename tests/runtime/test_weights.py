"""The weights file: what lies in it, and headers that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.loading import integrity
from llmc.runtime.loading.weights import map_weights

ORDER = ("table", "odd", "codes")


def rewrite(path: Path, change: dict[str, Any], pad: int = 64) -> None:
    """Replace entries of the header (None removes one), keeping the data where it is."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]) | change
    text = json.dumps({key: value for key, value in header.items() if value is not None}).encode()
    text += b" " * (-(8 + len(text)) % pad)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.fixture
def path(fake_artifact: Path) -> Path:
    return fake_artifact / "weights.safetensors"


@pytest.mark.parametrize("copied", [False, True, None])
def test_tensors_come_in_order_aligned_and_equal_to_the_library_s(path: Path, copied: bool | None) -> None:
    from safetensors.numpy import load_file

    arrays = map_weights(path, ORDER, copied).arrays
    wanted = load_file(path)
    for name, array in zip(ORDER, arrays, strict=True):
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable
        np.testing.assert_array_equal(array, wanted[name])
    before = path.read_bytes()
    arrays[0][:] = 0  # a private map: the file stays
    assert path.read_bytes() == before


def test_a_copy_is_not_the_file_s(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, mapped = (map_weights(path, ORDER, copied=copied).arrays for copied in (True, False))
    before = arrays[0].copy()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    np.testing.assert_array_equal(arrays[0], before)
    assert not np.array_equal(mapped[0], before)
    monkeypatch.setattr(integrity, "available_bytes", lambda: 1000)
    with pytest.raises(RequestError, match="copy_weights: .* bytes, and 1000 are available"):
        map_weights(path, ORDER, copied=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"odd": None}, "lies at"),
        ({"odd": {"dtype": "F32", "shape": [8], "data_offsets": [12416, 12444]}}, "lies at"),
        ({"odd": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}}, "lies at"),
        ({"odd": {"dtype": "F32", "shape": [7], "data_offsets": [28, 0]}}, "lies at"),
        ({"odd": {"dtype": "BF16", "shape": [7], "data_offsets": [0, 28]}}, "dtype"),
        ({"odd": {"dtype": "F32", "shape": [-7], "data_offsets": [0, 28]}}, "shape"),
        ({"odd": {"dtype": "F32", "shape": [2**47, 2**47], "data_offsets": [0, 28]}}, "lies at"),
        ({"odd": {"dtype": "F32", "shape": [7], "data_offsets": [0]}}, "data_offsets"),
        ({"odd": {"dtype": "F32", "shape": [7], "data_offsets": [0, 1, 2]}}, "offsets"),
        ({"odd": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28], "x": 1}}, "unknown key"),
        ({"odd": 5}, "wanted an object"),
        ({"more": {"dtype": "F32", "shape": [1], "data_offsets": [31680, 31684]}}, "end at|lies at"),
        ({"more": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, "does not name"),
    ],
)
def test_headers_that_lie(path: Path, change: dict[str, Any], message: str) -> None:
    rewrite(path, change)
    with pytest.raises(ArtifactError, match=message) as caught:
        map_weights(path, ORDER)
    assert "\n" not in str(caught.value)


def test_tensors_off_the_grid(path: Path) -> None:
    rewrite(path, {}, pad=1)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + length) % 64
    with pytest.raises(ArtifactError, match="multiple of 64"):
        map_weights(path, ORDER)


def test_other_tensors_than_the_manifest_names(path: Path) -> None:
    with pytest.raises(ArtifactError, match="missing: extra"):
        map_weights(path, (*ORDER, "extra"))
    with pytest.raises(ArtifactError, match="does not name: codes"):
        map_weights(path, ORDER[:2])


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 16, (9).to_bytes(8, "little") + b"{}", bytes(8) + b"{}"])
def test_files_that_are_no_safetensors(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ArtifactError):
        map_weights(path, ORDER)
