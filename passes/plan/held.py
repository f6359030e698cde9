"""What each device of a placement has of a model: the shares that passes/partition gives it, from the spec alone.

tests/passes/test_plan_held.py compares them, number by number, with what `partition` gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from llmc.compiler import kv_pages
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS
from llmc.compiler.placement import Placement
from llmc.compiler.spec import ModelSpec, cached_heads, pools_of
from llmc.compiler.spec.sources import ENCODER
from llmc.compiler.spec.tensors import TABLE, dimensions, encoder_layers, in_layer, is_router, required_tensors
from llmc.passes.partition.shares import Cut, apportion

LOOKED_UP = ("embedding", "positions", "encoder.embedding", "encoder.positions")  # a row a token is read of these
_LAST = ("final_norm", "head", "project_out")  # in the last stage, by how names begin; the rest is in the first
Formats = Mapping[str, str]  # our expanded name of a matrix -> its format
VECTOR = "f32"  # what is no matrix, and the matrices that no recipe lists, are float32


@dataclass(frozen=True)
class Tensor:
    """A device's share of one weight: rows x columns (one column of a vector), in a format.

    `decodes`: a step of the answer reads it; else only reading the source does. `experts`: how many matrices it is a
    stack of, 0 for none.
    """

    name: str  # with {layer}
    rows: int
    columns: int
    format: str
    matrix: bool
    decodes: bool = True
    experts: int = 0

    @property
    def numbers(self) -> int:
        """Its weights."""
        return self.rows * self.columns

    @property
    def bytes(self) -> int:
        """As it is packed."""
        return packed_bytes(self.format, self.rows, self.columns) if self.matrix else 4 * self.numbers

    @property
    def looked_up(self) -> bool:
        """Whether a token reads one row of it."""
        return self.name in LOOKED_UP


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike: their tensors' formats, how far back they see (0: all), in how many pages a token is."""

    formats: tuple[tuple[str, str], ...]  # name with {layer}, format
    window: int
    encoder: bool
    pools: int = 1


@dataclass(frozen=True)
class Held:
    """What one device has. `layers`: how often it has each kind of layer; `outer`: its tensors of no layer."""

    stage: int
    place: int
    cut: Cut
    layers: tuple[tuple[LayerKind, int], ...]
    outer: tuple[Tensor, ...]
    kv_heads: int  # in a layer's pages
    heads: int

    @property
    def layer_count(self) -> int:
        """Layers, an encoder's not counted."""
        return sum(count for kind, count in self.layers if not kind.encoder)


@lru_cache(4096)
def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a packed matrix."""
    kind = FORMATS[format]
    return math.prod(kind.packed_shape(rows, columns)) * np.dtype(kind.dtype).itemsize


class Model:
    """A spec with formats, prepared for many placements. `formats`: a format for all matrices, or one for each.

    Raises LlmcError for formats that are none, or matrices without one.
    """

    def __init__(self, spec: ModelSpec, formats: Formats | str, kv: str) -> None:
        self.spec, self.kv = spec, kv
        self.sizes = dimensions(spec)
        self.names = required_tensors(spec)
        self._formats = formats
        self.layers = max(spec.sizes.layers, encoder_layers(spec))
        self.kv_heads, self.kv_size = cached_heads(spec)
        if kv not in kv_pages.KINDS:
            raise LlmcError(f"kv {kv!r}: wanted one of {', '.join(kv_pages.KINDS)}")
        unknown = sorted({*([formats] if isinstance(formats, str) else formats.values())} - set(FORMATS))
        if unknown:
            raise LlmcError(f"unknown weight format {', '.join(unknown)}; llmc knows: {', '.join(FORMATS)}")
        self.kinds = [self._kinds(layer) for layer in range(self.layers)]
        self._tensors: dict[tuple[LayerKind, Cut], tuple[Tensor, ...]] = {}

    def _format(self, name: str, layer: int | None = None) -> str:
        if len(TABLE[name][0]) != 2 or name.endswith(("relative_bias", ".conv")):
            return VECTOR
        own = name if layer is None else name.replace("{layer}", str(layer))
        if isinstance(self._formats, str):
            return VECTOR if is_router(own) else self._formats
        if own not in self._formats:
            raise LlmcError(f"no format for {own}")
        return self._formats[own]

    def _kinds(self, layer: int) -> tuple[LayerKind, ...]:
        """Of a layer's number: the model's own layer, and its encoder's."""
        found = []
        for encoder, count in ((False, self.spec.sizes.layers), (True, encoder_layers(self.spec))):
            if layer >= count:
                continue
            names = [
                name for name in self.names
                if "{layer}" in name and name.startswith(ENCODER) == encoder and in_layer(name, layer, self.spec)
            ]  # fmt: skip
            near = [each for each in (self.spec.window, self.spec.convolution) if each and layer in each.layers]
            seen = near[0].size if near and not encoder else 0
            formats = tuple((name, self._format(name, layer)) for name in names)
            found.append(LayerKind(formats, seen, encoder, 1 if encoder else len(pools_of(self.spec, layer))))
        return tuple(found)

    def tensors(self, kind: LayerKind, cut: Cut) -> tuple[Tensor, ...]:
        """A layer's tensors on a device with this share."""
        if (kind, cut) not in self._tensors:
            self._tensors[kind, cut] = tuple(self._tensor(name, format, cut) for name, format in kind.formats)
        return self._tensors[kind, cut]

    def _tensor(self, name: str, format: str, cut: Cut) -> Tensor:
        letters = TABLE[name][0]
        shape = [self._own(name, letter, cut) for letter in letters]
        # An encoder works once a source, and leaves keys and values of it where these two have put them.
        decodes = not name.startswith(ENCODER) and ".cross_k" not in name and ".cross_v" not in name
        stack = letters[0] in ("experts_ffn", "experts_hidden")
        count = self._experts(cut) if stack else 0
        return Tensor(name, shape[0], shape[1] if len(shape) == 2 else 1, format, len(shape) == 2, decodes, count)

    def _own(self, name: str, letter: str, cut: Cut) -> int:
        """How many of a dimension a device has."""
        size = self.sizes[letter]
        if cut.alone or is_router(name):
            return size
        spec, heads = self.spec, self.spec.attention.heads
        if letter == "q_norm" and spec.attention.qk_norm == "heads":
            letter = "q"
        if letter == "k_norm" and spec.attention.qk_norm == "heads":
            letter = "kv"
        if letter in ("q", "heads", "gates", "mixed", "heads_plain", "heads_rope", "heads_rank"):
            return size // heads * cut.heads(heads, self.kv_heads).count
        if letter == "kv":
            return spec.attention.head_dim * len(cut.heads(heads, self.kv_heads).kv)
        if letter in ("ffn", "encoder_ffn", "shared_ffn"):
            first, end = cut.columns(size)
            return end - first
        if letter in ("experts_ffn", "experts_hidden"):
            return size // spec.experts.count * self._experts(cut)
        if letter in ("vocab", "context"):
            first, end = cut.rows(size)
            return end - first
        return size

    def _experts(self, cut: Cut) -> int:
        if cut.alone:
            return self.spec.experts.count
        first, end = cut.experts(self.spec.experts.count)
        return end - first

    def held(self, placement: Placement) -> list[Held]:
        """What each device has, by rank. Raises LlmcError as `partition` does, naming what there is too little of."""
        if self.spec.convolution is not None and any(len(stage) > 1 for stage in placement.stages):
            raise LlmcError("convolutions are not shared by devices")
        stages = [sum(shares) for shares in placement.shares]
        ranges = apportion(self.layers, stages, "layers, as stages")
        found = []
        for stage, shares in enumerate(placement.shares):
            counts = Counter(kind for layer in range(*ranges[stage]) for kind in self.kinds[layer])
            layers = tuple(counts.items())
            for place in range(len(shares)):
                found.append(self._held(stage, place, Cut(shares, place), layers, len(stages)))
        return found

    def _held(
        self, stage: int, place: int, cut: Cut, layers: tuple[tuple[LayerKind, int], ...], stages: int
    ) -> Held:  # fmt: skip
        own = cut.heads(self.spec.attention.heads, self.kv_heads)
        outer = tuple(
            self._tensor(name, self._format(name), cut)
            for name in self.names if "{layer}" not in name and self._outer_here(name, stage, stages)
        )  # fmt: skip
        return Held(stage, place, cut, layers, outer, len(own.kv), own.count)

    def _outer_here(self, name: str, stage: int, stages: int) -> bool:
        """Whether a stage has a tensor that no layer has."""
        if name.removeprefix(ENCODER).startswith("relative_bias"):
            return True  # attention of every layer adds it
        if name.removeprefix(ENCODER).startswith(_LAST):
            return stage == stages - 1
        tied = name == "embedding" and self.spec.head.tied and self.spec.head.kind == "logits"
        return stage == 0 or (tied and stage == stages - 1)

    def page_bytes(self, kv_heads: int) -> int:
        """Bytes of one page of one layer, 16 tokens, of so many kv heads."""
        kind = kv_pages.KINDS[self.kv]
        return math.prod(kind.page_shape(kv_heads, self.kv_size)) * kind.dtype.itemsize
