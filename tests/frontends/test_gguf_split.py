"""GGUF models in several files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.frontends.source import open_model

Write = Callable[..., Path]


@pytest.fixture
def parts(tiny_gguf: Write) -> list[Path]:
    """Three parts."""
    first = tiny_gguf(split_max_tensors=8)
    return sorted(first.parent.glob("tiny-*.gguf"))


def number(value: int, name: str = "split.no", kind: int = 2, size: int = 2) -> bytes:
    """A key as it is in the file."""
    return name.encode() + kind.to_bytes(4, "little") + value.to_bytes(size, "little")


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def refusal(path: Path) -> str:
    with pytest.raises(LlmcError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("split", [{"split_max_tensors": 8}, {"split_max_tensors": 8, "small_first_shard": True}])
def test_the_parts_are_one_model(tiny_gguf: Write, split: dict[str, Any]) -> None:
    first = tiny_gguf(quant="Q8_0", **split)
    assert len(list(first.parent.glob("tiny-*.gguf"))) == 3 + len(split) - 1
    with open_model(tiny_gguf(quant="Q8_0")) as whole, open_model(first) as found:
        assert found.spec == whole.spec
        assert found.tokenizer_json == whole.tokenizer_json
        assert list(found.tensors) == list(whole.tensors)
        assert len({tensor.file.name for tensor in found.tensors.values()}) == 3
        for name, tensor in whole.tensors.items():
            np.testing.assert_array_equal(found.tensors[name].read(), tensor.read())
            assert found.tensors[name].kept == tensor.kept


def test_the_name_is_that_of_the_whole(tiny_gguf: Write) -> None:
    first = tiny_gguf({"general.name": None}, split_max_tensors=8)
    with open_model(first) as source:
        assert source.spec.name == "tiny"


def test_a_file_that_is_split_into_one(tiny_gguf: Write) -> None:
    for count in (0, 1):
        open_model(tiny_gguf({"split.count": np.uint32(count), "split.no": np.uint32(0)})).close()
    assert "one of several parts (split.no = 2, split.count = 1)" in refusal(
        tiny_gguf({"split.count": np.uint32(1), "split.no": np.uint32(2)})
    )


def test_parts_that_are_missing_or_out_of_place(parts: list[Path], tmp_path: Path) -> None:
    first, second, third = parts
    assert "part 2 of 3; give the first, tiny-00001-of-00003.gguf" in refusal(second)
    moved = third.rename(tmp_path / "away.gguf")
    assert "part 'tiny-00003-of-00003.gguf' of 3 is not beside it" in refusal(first)
    assert "one of several parts (split.no = 2, split.count = 3), which are called" in refusal(moved)
    shutil.copy(second, third)
    assert "tiny-00003-of-00003.gguf: split.no, split.count, split.tensors.count are [1, 3, 20]" in refusal(first)
    third.unlink()
    outside = tmp_path.parent / f"{tmp_path.name}.gguf"
    moved.rename(outside)
    third.symlink_to(outside)
    assert "a link that leaves the folder" in refusal(first)
    third.unlink()
    outside.rename(third)
    renamed = first.rename(tmp_path / "tiny-00001-of-00004.gguf")
    assert "one of several parts" in refusal(renamed)
    renamed.rename(first)
    open_model(first).close()


def test_parts_that_contradict_one_another(parts: list[Path]) -> None:
    first, second, third = parts
    whole = {part: part.read_bytes() for part in parts}

    def broken(path: Path, old: bytes, new: bytes) -> str:
        replace(path, old, new)
        message = refusal(first)
        path.write_bytes(whole[path])
        return message

    assert "are [2, 3, 20], wanted [1, 3, 20]" in broken(second, number(1), number(2))
    assert "are [1, 4, 20]" in broken(second, number(3, "split.count"), number(4, "split.count"))
    total = "split.tensors.count"
    assert "are [1, 3, 21]" in broken(second, number(20, total, 5, 4), number(21, total, 5, 4))
    for part in parts:
        replace(part, number(20, total, 5, 4), number(21, total, 5, 4))
    assert "20 tensors in 3 parts, wanted 21" in refusal(first)
    for part, data in whole.items():
        part.write_bytes(data)
    assert "blk.0.attn_q.weight are in an earlier part too" in broken(
        third, b"blk.1.ffn_up.weight", b"blk.0.attn_q.weight"
    )


def test_a_key_that_only_a_later_part_has(parts: list[Path]) -> None:
    """Readers would differ on what it means."""
    second = parts[1]
    data = second.read_bytes()
    key = (16).to_bytes(8, "little") + b"llama.rope.other" + (4).to_bytes(4, "little") + (1).to_bytes(4, "little")
    assert len(key) == 32  # what follows stays aligned
    second.write_bytes(data[:16] + (4).to_bytes(8, "little") + key + data[24:])
    assert "tiny-00002-of-00003.gguf: has 'llama.rope.other' unlike the first part" in refusal(parts[0])
    same = key.replace(b"llama.rope.other", b"llama.block_coun")
    second.write_bytes(data[:16] + (4).to_bytes(8, "little") + same + data[24:])
    assert "has 'llama.block_coun'" in refusal(parts[0])


@settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 900), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3),
    st.none() | st.integers(0, 900),
)
def test_random_damage(parts: list[Path], which: int, edits: list[tuple[int, bytes]], cut: int | None) -> None:
    path = parts[which]
    whole = path.read_bytes()
    data = bytearray(whole)
    for at, patch in edits:
        data[at : at + len(patch)] = patch
    path.write_bytes(bytes(data[:cut]))
    try:
        open_model(parts[0]).close()
    except LlmcError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
    finally:
        path.write_bytes(whole)
