"""safetensors headers, good and bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from llmc.compiler.errors import SourceError
from llmc.frontends.files.safetensors_file import MAX_HEADER, SIZES, read_safetensors


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    values = torch.randn(3, 5)
    for kind, stored in ((torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")):
        path = tmp_path / f"{stored}.safetensors"
        save_torch({"a": values.to(kind), "b": torch.ones(4)}, path, {"format": "pt"})
        tensors = read_safetensors(path)
        assert set(tensors) == {"a", "b"}
        assert (tensors["a"].stored, tensors["a"].shape) == (stored, (3, 5))
        assert tensors["a"].nbytes == 15 * SIZES[stored]
        np.testing.assert_array_equal(tensors["a"].read(), values.to(kind).float().numpy())


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    values = np.arange(2, dtype=np.float32)
    header = {"a": entry(0, 1, (1,), "U8"), "b": entry(1, 9)}
    path.write_bytes(packed(header, b"\0" + values.tobytes()))
    np.testing.assert_array_equal(read_safetensors(path)["b"].read(), values)


def test_types_that_are_not_floats_are_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed({"a": entry(0, 8, (1,), "I64")}))
    with pytest.raises(SourceError, match="a is stored as I64, wanted one of F32"):
        read_safetensors(path)["a"].read()


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "no header": (b"\0" * 9, "9 bytes, wanted at least"),
    "header past the end": (packed({}, length=10**6), "header of 1000000 bytes"),
    "header length 2^64-1": (packed({}, length=2**64 - 1), "header of 18446744073709551615 bytes"),
    "not an object": (packed(b"[1,2,3,4]"), "starts with"),
    "not JSON": (packed(b"{nonsense}"), "not valid JSON"),
    "not UTF-8": (packed(b'{"\xff\xfe": 1}'), "not valid JSON"),
    "deep": (packed(b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}"), "nested too deep"),
    "long number": (packed(b'{"a":' + b"9" * 10000 + b"}"), "not valid JSON|wanted dtype"),
    "twice": (packed(b'{"a":1,"a":2}'), "'a' appears twice"),
    "no dict": (packed({"a": 1}), "wanted dtype, shape and data_offsets"),
    "extra key": (packed({"a": entry() | {"more": 1}}), "wanted dtype, shape and data_offsets"),
    "dtype": (packed({"a": entry(dtype="F99")}), "dtype 'F99'"),
    "dtype a list": (packed({"a": entry(dtype=["F32"])}), "dtype "),
    "shape": (packed({"a": entry(shape=[-2])}), "shape"),
    "shape of floats": (packed({"a": entry(shape=[2.0])}), "shape"),
    "shape of booleans": (packed({"a": entry(shape=[True, 2])}), "shape"),
    "many dimensions": (packed({"a": entry(shape=[1] * 100)}), "at most 8 sizes"),
    "huge shape": (packed({"a": entry(shape=[2**62, 2**62])}), "8 bytes for F32"),
    "shape that wraps": (packed({"a": entry(shape=[2**32, 2**32, 2])}), "8 bytes for F32"),
    "too small": (packed({"a": entry(shape=[3])}), "8 bytes for F32"),
    "offsets": (packed({"a": {**entry(), "data_offsets": [0]}}), "data_offsets"),
    "backwards": (packed({"a": entry(8, 0)}), "-8 bytes for F32"),
    "past the end": (packed({"a": entry(8, 16)}), "data ends at"),
    "overlap": (packed({"a": entry(), "b": entry()}), "overlaps the tensor before it"),
    "gap": (packed({"a": entry(8, 16)}, bytes(16)), "follows a gap"),
    "rest": (packed({"a": entry()}, bytes(9)), "1 bytes after the last tensor"),
    "NaN": (packed(b'{"a":NaN}'), "NaN is not a JSON number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_headers(tmp_path: Path, case: str) -> None:
    data, message = BAD[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message) as caught:
        read_safetensors(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("bad.safetensors: ")


def test_header_over_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little") + b"{")
        file.truncate(MAX_HEADER + 100)
    with pytest.raises(SourceError, match=f"wanted at most {MAX_HEADER}"):
        read_safetensors(path)


@settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 260), st.binary(min_size=1, max_size=4)), max_size=3),
    cut=st.none() | st.integers(0, 260),
)
def test_random_damage(tmp_path: Path, edits: list[tuple[int, bytes]], cut: int | None) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones((3, 4), np.float32), "b": np.ones(5, np.float16)}, path)
    data = bytearray(path.read_bytes())
    for at, patch in edits:
        data[at : at + len(patch)] = patch
    path.write_bytes(bytes(data[:cut]))
    try:
        for tensor in read_safetensors(path).values():
            assert tensor.read().shape == tensor.shape
    except SourceError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
