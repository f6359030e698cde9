"""Something to run a kernel on: operands of real sizes, with values as a model has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from llmc.compiler import meaning
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, TILE, BlockFormat, Quantized, block_format, ceil_to, encode
from llmc.compiler.kv_pages import KINDS, PAGE
from llmc.compiler.ops import OPS
from llmc.targets.lower import KernelCall

Array = NDArray[Any]

CONTEXT = 1024  # tokens that a sequence has when its next one is decoded
MOST_DECODED = 64  # rows; more are one prompt

_WEIGHTS = ("weight", "gate", "up")  # packed matrices
_COLD = (*_WEIGHTS, "kv")  # what a step reads once, and so never finds in a cache


@dataclass(frozen=True)
class Operands:
    """`inputs` and outputs' shapes and dtypes of one call; `cold`: the inputs that copies are made of."""

    inputs: list[Array]
    outputs: list[tuple[tuple[int, ...], str]]
    cold: tuple[int, ...]


@dataclass(frozen=True)
class _Kind:
    """What an operand must be; a size of None is the step's own."""

    shape: tuple[int | None, ...]
    dtype: str


def operands_for(call: KernelCall, rows: int) -> Operands:
    """Operands of a kernel for a number of rows, the same every time.

    Raises LlmcError for an operand whose values cannot be made up: an index, say, that this file knows nothing of.
    """
    names = OPS[call.name].operands
    kinds = [_Kind(tuple(map(_fixed, shape)), dtype) for shape, dtype in zip(call.shapes, call.dtypes, strict=True)]
    maker = _Maker(call.name, call.attrs, dict(zip(names, kinds, strict=False)), rows)
    inputs = [maker.array(operand) for operand in names]
    outputs = [(maker.shape(kind), kind.dtype) for kind in kinds[len(names) :]]
    return Operands(inputs, outputs, tuple(i for i, operand in enumerate(names) if operand in _COLD))


def _fixed(size: Any) -> int | None:
    return int(size) if isinstance(size, (int, tirx.IntImm)) else None


class _Maker:
    """The operands of one call, made when they are asked for."""

    def __init__(self, name: str, attrs: Mapping[str, Any], kinds: dict[str, _Kind], rows: int) -> None:
        self.name, self.attrs, self.kinds, self.rows = name, attrs, kinds, rows
        self.rng = np.random.default_rng(rows)
        self.made: dict[str, Array] = {}

    def array(self, operand: str) -> Array:
        """The operand's values."""
        if operand not in self.made:
            make = _INDEXES.get(operand) or (_PACKED.get(operand) if "format" in self.attrs else None)
            made = {operand: self.floats(operand)} if make is None else make(self)
            for each, values in made.items():
                self.made[each] = np.ascontiguousarray(self._checked(each, values))
        return self.made[operand]

    def floats(self, operand: str) -> Array:
        """Normal numbers; refuses what are none."""
        kind = self.kinds[operand]
        if kind.dtype != "float32":
            raise LlmcError(f"llmc.{self.name}: no values are known for its operand {operand!r}, so it is not timed")
        return self.rng.standard_normal(self.shape(kind)).astype(np.float32)

    def shape(self, kind: _Kind) -> tuple[int, ...]:
        """A shape, the sizes that only a step knows replaced by the number of rows."""
        return tuple(self.rows if size is None else size for size in kind.shape)

    def _checked(self, operand: str, values: Array) -> Array:
        kind = self.kinds[operand]
        fits = all(size in (None, got) for size, got in zip(kind.shape, values.shape, strict=True))
        assert fits, (self.name, operand, values.shape, kind)
        assert kind.dtype == str(values.dtype), (self.name, operand, values.dtype, kind)
        return values

    @property
    def columns(self) -> int:
        """Of the left side of a product, as floats."""
        first = self.kinds[OPS[self.name].operands[0]]
        words = self.shape(first)[1]
        if "codes" in self.kinds:
            return 4 * words
        return words if first.dtype == "float32" else 2 * words

    @property
    def places(self) -> int:
        """Experts that a row goes through."""
        return self.shape(self.kinds["ids"])[1]


def _left(maker: _Maker) -> dict[str, Array]:
    """The left side of a product, in the form that the kernel takes."""
    x = maker.rng.standard_normal((maker.rows, maker.columns)).astype(np.float32)
    if "codes" in maker.kinds:
        format = block_format(str(maker.attrs["format"]))
        left = meaning.left_of(format, x)
        return dict(zip(("codes", "scales", "totals"), left, strict=True))
    return {"x": meaning.round_rows(x) if maker.kinds["x"].dtype == "int32" else x}


def _weight(operand: str, maker: _Maker) -> dict[str, Array]:
    """A packed matrix: one tile of any codes and scales, again and again."""
    format = FORMATS[str(maker.attrs["format"])]
    wanted = maker.shape(maker.kinds[operand])
    places = maker.places if "ids" in maker.kinds else 1
    for columns in (maker.attrs.get("columns"), maker.columns, maker.columns // places):
        if columns and tuple(format.packed_shape(TILE, int(columns)))[1:] == wanted[1:]:
            return {operand: np.repeat(_tile(maker.rng, format, int(columns)), wanted[0], axis=0)}
    raise LlmcError(f"llmc.{maker.name}: no {format.name} matrix has the shape {wanted}, so it is not timed")


def _tile(rng: np.random.Generator, format: Any, columns: int) -> Array:
    """A packed matrix of 16 rows."""
    if not isinstance(format, BlockFormat):
        packed: Array = format.pack(rng.standard_normal((TILE, columns)).astype(np.float32))
        return packed
    width = ceil_to(columns, format.columns)
    blocks, records = width // format.block, width // format.columns
    codes = rng.integers(0, format.top + 1, (TILE, width // (2 if format.pair else 1))).astype(np.uint8)
    most = 16 if format.sub_bits == 4 else 128
    wide = records if format.scale == "super" else blocks
    found: dict[str, Array] = {
        key: rng.standard_normal((TILE, size)).astype(np.float16)
        for key, size in (("scale", wide), ("minimum", wide), ("zero", blocks))
    }
    found["row_scale"] = rng.standard_normal(TILE).astype(np.float32)
    found["sub_scale"] = rng.integers(0 if most == 16 else -128, most, (TILE, blocks)).astype(np.int8)
    found["sub_minimum"] = rng.integers(0, most, (TILE, blocks)).astype(np.uint8)
    used = {"f16": ["scale"], "super": ["scale", "sub_scale"], "row": ["row_scale", "sub_scale"]}[format.scale]
    if isinstance(format.offset, str):
        used += [format.offset, "sub_minimum"] if format.scale == "super" else [format.offset]
    return encode(format, Quantized(codes, {key: found[key] for key in used}), TILE, columns)


def _experts(maker: _Maker) -> dict[str, Array]:
    """Different experts for each row, in ascending order."""
    count, used = int(maker.attrs["experts"]), maker.places
    chosen = np.argsort(maker.rng.random((maker.rows, count)), axis=1)[:, :used]
    return {"ids": np.sort(chosen, axis=1).astype(np.int32)}


def _pages(maker: _Maker) -> dict[str, Array]:
    """Where rows stand: each the next token of a sequence of its own, or all one prompt; pages in no order."""
    rows = maker.rows
    alone = rows <= MOST_DECODED
    seqs = np.arange(rows, dtype=np.int32) if alone else np.zeros(rows, np.int32)
    slots = np.full(rows, CONTEXT - 1, np.int32) if alone else np.arange(rows, dtype=np.int32)
    count = rows if alone else 1
    pages = -(-(CONTEXT if alone else rows) // PAGE)
    made = {
        "seqs": seqs, "slots": slots, "holes": np.zeros((count, 2), np.int32),
        "page_indptr": pages * np.arange(count + 1, dtype=np.int32),
        "page_ids": maker.rng.permutation(count * pages).astype(np.int32),
        "source_lengths": np.full(count, PAGE * pages, np.int32),
    }  # fmt: skip
    made["source_indptr"], made["source_ids"] = made["page_indptr"], made["page_ids"]
    return {name: values for name, values in made.items() if name in maker.kinds}


def _kv(maker: _Maker) -> dict[str, Array]:
    """The pages that these rows see: one that holds 16 tokens, again and again."""
    heads, size = int(maker.attrs["kv_heads"]), int(maker.attrs["head_dim"])
    kind = KINDS[str(maker.attrs["kv_dtype"])]
    page = np.zeros((1, *kind.page_shape(heads, size)), kind.dtype)
    for place in range(PAGE):
        k, v = maker.rng.standard_normal((2, heads, size)).astype(np.float32)
        kind.store(page, 0, place, k, v)
    listed = "page_ids" if "page_ids" in maker.kinds else "source_ids"
    return {"kv": np.repeat(page, len(maker.array(listed)), axis=0)}


Make = Callable[[_Maker], dict[str, Array]]
_PAGED = ("seqs", "slots", "holes", "page_indptr", "page_ids", "source_lengths", "source_indptr", "source_ids")
_INDEXES: dict[str, Make] = {"ids": _experts, "kv": _kv, **dict.fromkeys(_PAGED, _pages)}
_PACKED: dict[str, Make] = {
    **{name: partial(_weight, name) for name in _WEIGHTS},
    **dict.fromkeys(("x", "codes", "scales", "totals"), _left),
}
