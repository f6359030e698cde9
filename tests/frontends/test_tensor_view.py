"""A view reads what slicing the whole tensor in NumPy gives; selected rows keep their stored codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from llmc.compiler.errors import SourceError
from llmc.compiler.formats import Quantized, block_format, dequantize
from llmc.compiler.spec.sources import PARTS, before_turning, layout, parse, part_names
from llmc.frontends import tensor_view
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.tensor import READABLE, Tensor
from llmc.frontends.tensor_view import view

sys.path.insert(0, str(Path(__file__).parent))
from int4_layers import PACKINGS, Layer, kept_as, random_layer
from test_gguf_blocks import TYPES, assert_same, random_blocks, tensor_of
from test_int4_tensors import tensor_of as int4_tensor

Array = np.ndarray[Any, Any]
MakeTensor = Callable[[Array], Tensor]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> MakeTensor:
    """A function that gives a float32 array as a tensor "t" in a file."""
    path = tmp_path_factory.mktemp("views") / "t"

    def write(array: Array) -> Tensor:
        path.unlink(missing_ok=True)  # earlier tensors keep what they have mapped
        path.write_bytes(b"other" + np.ascontiguousarray(array, "<f4").tobytes())
        return Tensor("t", array.shape, "F32", 5, 4 * array.size, open_mapped(path, 1))

    return write


def fuse(parts: list[Array], pieces: int) -> Array:
    """Rows of every part in turn, in each piece: the slow, obvious twin of a `Split`."""
    rows = []
    for piece in range(pieces):
        for part in parts:
            size = len(part) // pieces
            rows += [part[size * piece + i] for i in range(size)]
    return np.array(rows).reshape(-1, *parts[0].shape[1:])


def read_as(tensor: Tensor, value: str, ours: str, shapes: dict[str, tuple[int, ...]], kv_heads: int = 1) -> Tensor:
    """`ours` as the spec's `value` has it read from the file's `tensor`."""
    place = layout(ours, parse(value), shapes, kv_heads)
    assert place.shape == tensor.shape
    return view(tensor, parse(value), shapes[ours], place)


def assert_reads(tensor: Tensor, expected: Array) -> None:
    """Whole and every range of rows."""
    assert tensor.shape == expected.shape
    assert tensor.readable
    values = tensor.read()
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)
    rows = len(expected)
    for start, stop in {(0, rows), (0, 1), (rows - 1, rows), (rows // 3, 2 * rows // 3), (rows, rows)}:
        np.testing.assert_array_equal(tensor.read_rows(start, stop), expected[start:stop])
    with pytest.raises(SourceError, match=f"rows 0 to {rows + 1} of {rows}"):
        tensor.read_rows(0, rows + 1)


@st.composite
def fusions(draw: st.DrawFn) -> tuple[str, dict[str, int], int]:
    """(steps, our short names -> rows, KV heads)."""
    parts = draw(st.lists(st.sampled_from(PARTS), min_size=2, unique=True))
    kv_heads = draw(st.integers(1, 5))
    ways = ["", f" by {kv_heads}"] + [" by group"] * (set(parts) <= set("qkv"))
    way = draw(st.sampled_from(ways))
    unit = kv_heads if way else 1
    rows = {part: unit * draw(st.integers(1, 6)) for part in parts}
    skip = draw(st.integers(0, 3))
    steps = [*(["transposed"] * draw(st.booleans())), *([f"skip {skip}"] if skip else []), " ".join(parts) + way]
    return " | ".join(steps), rows, kv_heads


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(fusion=fusions(), columns=st.integers(0, 5), chunk=st.integers(1, 40))
def test_every_step_is_slicing(
    stored: MakeTensor, fusion: tuple[str, dict[str, int], int], columns: int, chunk: int
) -> None:
    steps, rows, kv_heads = fusion
    source = parse(f"t | {steps}")
    assert source.split is not None
    random = np.random.default_rng(sum(rows.values()))
    suffix = "" if columns or source.transposed else "_bias"  # vectors too
    width = (columns or 2,) if not suffix else ()
    parts = {
        f"layers.0.{part}{suffix}": random.standard_normal((count, *width)).astype(np.float32)
        for part, count in rows.items()
    }
    pieces = kv_heads if source.split.pieces is None else source.split.pieces
    skipped = random.standard_normal((source.skip, *width)).astype(np.float32)
    whole = np.concatenate([skipped, fuse(list(parts.values()), pieces)])
    tensor = stored(whole.T if source.transposed else whole)
    shapes = {name: part.shape for name, part in parts.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_view, "CHUNK", chunk)
        for name, part in parts.items():
            assert part_names(name, source) == list(parts)
            ours = read_as(tensor, f"t | {steps}", name, shapes, kv_heads)
            assert (ours.name, ours.stored, ours.files) == ("t", "F32", tensor.files)
            assert_reads(ours, part)


def test_matrices_of_heads_are_turned_one_by_one(stored: MakeTensor) -> None:
    """3 heads with 2 rows of one part and 4 of another, over 5 columns; the first part is read turned."""
    array = np.random.default_rng(0).standard_normal((3 * 6, 5)).astype(np.float32)
    heads = array.reshape(3, 6, 5)
    fused, shapes = "t | k_up v_up by group", {"k_up": (3 * 5, 2), "v_up": (3 * 4, 5)}
    turned = parse(f"{fused} | turned by group")
    read = {name: before_turning(shape, turned, 3) if name == "k_up" else shape for name, shape in shapes.items()}
    place = layout("k_up", turned, read, 3)
    assert place.shape == array.shape
    up = view(stored(array), turned, shapes["k_up"], place, 3)
    assert up.kept is None
    assert_reads(up, heads[:, :2].transpose(0, 2, 1).reshape(15, 2))
    assert_reads(
        view(stored(array), parse(fused), shapes["v_up"], layout("v_up", parse(fused), read, 3), 3),
        heads[:, 2:].reshape(12, 5),
    )


@pytest.mark.parametrize("shape", [(6, 4), (5,), (1, 1)])
def test_single_steps(shape: tuple[int, ...], stored: MakeTensor) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    rows = len(array)
    assert_reads(read_as(stored(array), "t", "positions", {"positions": shape}), array)
    if rows > 2:
        shapes = {"positions": (rows - 2, *shape[1:])}
        assert_reads(read_as(stored(array), "t | skip 2", "positions", shapes), array[2:])
    if len(shape) == 2:
        turned = read_as(stored(array), "t | transposed", "x", {"x": shape[::-1]})
        assert_reads(turned, array.T)
        assert turned.read().flags.c_contiguous
        for row in range(rows):
            vector = read_as(stored(array), f"t | row {row} of {rows}", "embedding_bias", {"embedding_bias": shape[1:]})
            assert vector.kept is None
            assert_reads(vector, array[row])
        vector = read_as(stored(array.T), f"t | transposed | row 0 of {rows}", "x", {"x": shape[1:]})
        assert_reads(vector, array[0])


def test_normalized_rows(stored: MakeTensor) -> None:
    """As torch does it: a row shorter than 1e-12 is divided by that, and one of zeros stays."""
    array = np.random.default_rng(3).standard_normal((9, 5)).astype(np.float32)
    array[3], array[4], array[5] = 0, 1e-14, 1e-20
    expected = functional.normalize(torch.from_numpy(array)).numpy()
    assert 0 < expected[4].max() < 0.1
    for value, rows in (("t | normalized", array), ("t | transposed | normalized", array.T)):
        read = read_as(stored(rows), value, "head", {"head": (9, 5)})
        assert read.kept is None
        np.testing.assert_allclose(read.read(), expected, rtol=1e-6)
        np.testing.assert_array_equal(read.read_rows(2, 7), read.read()[2:7])
    first, second = (
        read_as(stored(array), "t | q k | normalized", name, {"q": (4, 5), "k": (5, 5)}).read() for name in "qk"
    )
    np.testing.assert_allclose(np.concatenate([first, second]), expected, rtol=1e-6)


def test_a_matrix_as_a_vector(stored: MakeTensor) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    vector = tensor_view.flat(stored(array))
    assert vector.kept is None
    assert_reads(vector, array.reshape(-1))
    np.testing.assert_array_equal(tensor_view.flat(replace(stored(array), plus=1.0)).read(), array.reshape(-1) + 1)


def test_gpt_neox_heads(stored: MakeTensor) -> None:
    """Rows numbered by hand: three heads of two numbers, q, k and v of a head together."""
    numbers = stored(np.arange(18, dtype=np.float32))
    shapes = {f"{part}_bias": (6,) for part in "qkv"}
    read = {part: read_as(numbers, "t | q k v by group", f"{part}_bias", shapes, 3).read().tolist() for part in "qkv"}
    assert read == {"q": [0, 1, 6, 7, 12, 13], "k": [2, 3, 8, 9, 14, 15], "v": [4, 5, 10, 11, 16, 17]}


def test_groups_of_queries(stored: MakeTensor) -> None:
    """Two KV heads, four queries, heads of one number: [q q k v] twice."""
    numbers = stored(np.arange(8, dtype=np.float32))
    shapes = {"q_bias": (4,), "k_bias": (2,), "v_bias": (2,)}
    read = {name: read_as(numbers, "t | q k v by group", name, shapes, 2).read().tolist() for name in shapes}
    assert read == {"q_bias": [0, 1, 4, 5], "k_bias": [2, 6], "v_bias": [3, 7]}


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    kind=st.sampled_from(list(TYPES)),
    blocks=st.integers(1, 3),
    rows=st.tuples(*[st.integers(1, 5)] * 3),
    pieces=st.integers(1, 4),
    skip=st.integers(0, 3),
)
def test_rows_of_gguf_blocks_are_kept_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, kind: str, blocks: int, rows: tuple[int, ...], pieces: int, skip: int
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    raws = [random_blocks(kind, pieces * count, blocks, seed) for seed, count in enumerate(rows)]
    whole = np.concatenate([random_blocks(kind, 4, blocks)[:skip], fuse(raws, pieces)])
    tensor = tensor_of(whole, kind, folder / "fused")
    value = "t" + (f" | skip {skip}" if skip else "") + " | q k v by group"
    own = {part: tensor_of(raw, kind, folder / part) for part, raw in zip("qkv", raws, strict=True)}
    for part, expected in own.items():
        ours = read_as(tensor, value, part, {name: own[name].shape for name in own}, pieces)
        assert ours.kept == expected.kept == TYPES[kind][0]
        assert_same(ours.read_quantized(), expected.read_quantized())
        assert_reads(ours, expected.read())


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("value", ["t | q k v", "t | q k v by group"])
def test_rows_of_int4_layers_are_kept_bit_for_bit(kind: str, value: str, tmp_path: Path) -> None:
    rows = {"q": 32, "k": 16, "v": 16}
    layers = [random_layer(count, 96, 32, PACKINGS[kind][2], count) for count in rows.values()]
    pieces = 2 if "group" in value else 1
    codes, zeros, scales = (fuse([getattr(x, n) for x in layers], pieces) for n in ("codes", "zeros", "scales"))
    tensor = int4_tensor(kind, Layer(codes, zeros, scales, 32), 32, tmp_path / "fused.safetensors")
    assert tensor.turned
    shapes = {part: (count, 96) for part, count in rows.items()}
    for part, layer in zip(rows, layers, strict=True):
        ours = read_as(tensor, value, part, shapes, 2)
        alone = int4_tensor(kind, layer, 32, tmp_path / f"{part}.safetensors")
        assert ours.kept == alone.kept == kept_as(kind, "int4_b32")
        assert ours.files == tensor.files
        assert_same(ours.read_quantized(), alone.read_quantized())
        assert_reads(ours, layer.values())


def test_kept_codes_are_the_values(tmp_path: Path) -> None:
    tensor = tensor_of(random_blocks("Q4_K", 12, 2), "Q4_K", tmp_path / "t")
    format = block_format("q4_k")
    ours = read_as(tensor, "t | skip 3 | q k", "k", {"q": (4, 512), "k": (5, 512)})
    quantized = ours.read_quantized()
    assert isinstance(quantized, Quantized)
    np.testing.assert_array_equal(dequantize(format, quantized)[:, :512], tensor.read()[7:])


def test_what_is_turned_is_not_kept(tmp_path: Path) -> None:
    """Blocks lie along the file's rows, which are columns here."""
    tensor = tensor_of(random_blocks("Q8_0", 64, 2), "Q8_0", tmp_path / "t")
    shapes = {"q": (48, 64), "k": (16, 64)}
    turned = read_as(tensor, "t | transposed | q k", "q", shapes)
    assert turned.kept is None
    with pytest.raises(SourceError, match="t is stored as Q8_0"):
        turned.read_quantized()
    assert_reads(turned, tensor.read().T[:48])


def test_a_type_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(64))
    tensor = Tensor("t", (4, 4), "I32", 0, 64, open_mapped(tmp_path / "t", 1))
    assert "I32" not in READABLE
    shapes = {"q": (2, 4), "k": (2, 4)}
    for value in ("t | q k", "t | transposed | q k"):
        ours = read_as(tensor, value, "q", shapes)
        assert not ours.readable
        with pytest.raises(SourceError, match="t is stored as I32"):
            ours.read()


def test_damage_in_a_part(stored: MakeTensor) -> None:
    array = np.ones((6, 2), np.float32)
    array[4, 1] = np.nan
    tensor, shapes = stored(array), {"q": (3, 2), "k": (3, 2)}
    np.testing.assert_array_equal(read_as(tensor, "t | q k", "q", shapes).read(), 1)
    with pytest.raises(SourceError, match="NaN or infinite"):
        read_as(tensor, "t | q k", "k", shapes).read()
