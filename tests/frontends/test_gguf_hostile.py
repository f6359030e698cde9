"""GGUF files that are damaged or lie: refused in one line, before anything large is allocated."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError, SourceError
from llmc.frontends.gguf.file import read_gguf
from llmc.frontends.source import open_model

Write = Callable[..., Path]


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def entry(name: str = "w", dims: tuple[int, ...] = (32, 2), type_id: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + u32(len(dims)) + sizes + struct.pack("<IQ", type_id, offset)


def file(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(4096),
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys + tensors)
    return head + bytes(-len(head) % 32) + data


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


U64 = 2**64 - 1
CASES = {
    "magic": (file(magic=b"GGML"), "not a GGUF file"),
    "version 1": (file(version=1), "version 1"),
    "version 4": (file(version=4), "version 4"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "tensor count": (file(counts=(U64, 0)), "18446744073709551615 tensors"),
    "tensor count for the room": (file(counts=(100000, 0)), "room for"),
    "key count": (file(counts=(0, U64)), "18446744073709551615 keys"),
    "key count for the room": (file(counts=(0, 60000)), "room for"),
    "key length": (file([struct.pack("<Q", U64)]), "a name of 18446744073709551615 bytes"),
    "key of no length": (file([key("", 4, u32(1))]), "a name of 0 bytes"),
    "key length past the end": (file([key("k" * 300, 4, u32(1))]), "a name of 300 bytes"),
    "key not UTF-8": (file([text(b"\xff\xfe") + u32(4) + u32(1)]), "not UTF-8"),
    "key twice": (file([key("a", 4, u32(1)), key("a", 4, u32(2))]), "appears twice"),
    "value type": (file([key("a", 99, u32(1))]), "value type 99"),
    "string length": (file([key("a", 8, struct.pack("<Q", U64))]), "bytes wanted at"),
    "string length, signed": (file([key("a", 8, struct.pack("<Q", 1 << 63))]), "bytes wanted at"),
    "string not UTF-8": (file([key("a", 8, text(b"\xc3"))]), "not UTF-8"),
    "boolean": (file([key("a", 7, b"\x02")]), "neither 0 nor 1"),
    "array of arrays": (file([key("a", 9, array(9, 1, array(4, 1, u32(1))))]), "array of arrays"),
    "array type": (file([key("a", 9, array(77, 1))]), "value type 77"),
    "array length": (file([key("a", 9, array(4, U64))]), "18446744073709551615 items"),
    "array length, wrapping": (file([key("a", 9, array(12, 1 << 61))]), "items, wanted"),
    "array of strings": (file([key("a", 9, array(8, 1 << 40))]), "items, wanted"),
    "no dimensions": (file(tensors=[entry(dims=())]), "0 dimensions"),
    "five dimensions": (file(tensors=[entry(dims=(1, 1, 1, 1, 1))]), "5 dimensions"),
    "four thousand million": (file(tensors=[text("w") + u32(U64 >> 32)]), "4294967295 dimensions"),
    "zero size": (file(tensors=[entry(dims=(32, 0))]), "wanted each at least 1"),
    "overflow": (file(tensors=[entry(dims=(1 << 32, 1 << 32))]), "less than 2^63"),
    "overflow to little": (file(tensors=[entry(dims=(1 << 63, 2, 1 << 63))]), "less than 2^63"),
    "huge": (file(tensors=[entry(dims=(1 << 30, 1 << 30))]), "data ends at"),
    "type": (file(tensors=[entry(type_id=200)]), "type 200"),
    "removed type": (file(tensors=[entry(type_id=4)]), "type 4"),
    "block": (file(tensors=[entry(dims=(33, 2), type_id=2)]), "multiple of 32 for Q4_0"),
    "offset": (file(tensors=[entry(offset=U64)]), "data at 18446744073709551615, wanted 0"),
    "offset past the end": (file(tensors=[entry(dims=(32, 1000))]), "data ends at"),
    "overlap": (file(tensors=[entry("a"), entry("b", offset=0)]), "data at 0, wanted 256"),
    "gap": (file(tensors=[entry("a"), entry("b", offset=512)]), "data at 512, wanted 256"),
    "tensor twice": (file(tensors=[entry("a"), entry("a", offset=256)]), "appears twice"),
    "control characters": (file(tensors=[entry("a\n\x1b[2J", type_id=99)]), r"\\n\\x1b\[2J"),
}
CASES |= {
    f"alignment {value}": (file([key("general.alignment", 4, u32(value))]), "a power of two")
    for value in (0, 3, 48, 1 << 31)
}
CASES["alignment text"] = (file([key("general.alignment", 8, text("32"))]), "a power of two")


@pytest.mark.parametrize("case", CASES)
def test_lies_in_the_header(tmp_path: Path, case: str) -> None:
    data, message = CASES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message.replace("^", r"\^")) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("bad.gguf: ")
    with pytest.raises(LlmcError):
        open_model(path)


def test_the_well_formed_case_is_read(tmp_path: Path) -> None:
    """So that each case above is refused for its own fault only."""
    path = tmp_path / "good.gguf"
    keys = [key("a", 9, array(4, 2, u32(1) + u32(2))), key("general.alignment", 4, u32(64))]
    path.write_bytes(file(keys, [entry("a"), entry("b", offset=256)]))
    read = read_gguf(path)
    assert read.metadata == {"a": [1, 2], "general.alignment": 64}
    assert list(read.tensors) == ["a", "b"]
    assert read.tensors["b"].shape == (2, 32)


def test_cut_short_anywhere(tiny_gguf: Write, tmp_path: Path) -> None:
    data = tiny_gguf().read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 2000, 37), *range(2000, len(data), 4999), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(SourceError) as caught:
            open_model(path)
        assert "\n" not in str(caught.value)


@pytest.mark.model
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.02, 0.5, 0.999999])
def test_demo_model_cut_short(smollm2_gguf: Path, tmp_path: Path, share: float) -> None:
    length = int(smollm2_gguf.stat().st_size * share)
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as whole:
        path.write_bytes(whole.read(length))
    with pytest.raises(SourceError, match=r"cut\.gguf: .*(damaged|cut short), fetch it again"):
        open_model(path)


def test_what_is_not_a_file(tmp_path: Path) -> None:
    import os

    with pytest.raises(SourceError, match="no such file or folder"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(SourceError, match="config.json"):
        open_model(tmp_path)
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(SourceError, match="not a regular file"):
        open_model(pipe)
    with pytest.raises(SourceError, match="cannot be opened|no such file"):
        open_model("bad\0name.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(SourceError, match="give the folder"):
        open_model(tmp_path / "model.safetensors")


@pytest.fixture
def fuzzed(tiny_gguf: Write) -> tuple[Path, bytes]:
    path = tiny_gguf()
    return path, path.read_bytes()


@settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 9000),  # the header and the first weights of the tiny file
            st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8))),
        ),
        min_size=1,
        max_size=4,
    ),
    st.none() | st.integers(0, 9000),
)
def test_random_damage(fuzzed: tuple[Path, bytes], edits: list[tuple[int, bytes]], cut: int | None) -> None:
    """Whatever the bytes are, open_model works or raises LlmcError in one line."""
    path, whole = fuzzed
    data = bytearray(whole)
    for at, patch in edits:
        data[at : at + len(patch)] = patch
    path.write_bytes(bytes(data[:cut]))
    try:
        with open_model(path) as source:
            for tensor in source.tensors.values():
                assert tensor.read().shape == tensor.shape
    except LlmcError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
        assert len(str(error)) < 8000  # noqa: PT017
