"""What config.json's table of a quantizer becomes: something that makes one matrix of the tensors that hold it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from llmc.frontends.tensor import Tensor

Parts = dict[str, Tensor]  # of one layer, by what follows its name


class Packing(Protocol):
    """How a folder's quantized matrices are stored."""

    def fold(self, found: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """The file's tensors, with one in place of those that together are a quantized matrix.

        Raises SourceError listing every matrix whose parts are missing, of the wrong type or shape.
        """
        ...


def by_layer(found: Mapping[str, Tensor], parts: Collection[str]) -> tuple[dict[str, Parts], dict[str, Tensor]]:
    """Tensors called "LAYER.PART" by layer and part, and all others by name."""
    layers: dict[str, Parts] = {}
    others = {}
    for name, tensor in found.items():
        layer, _, part = name.rpartition(".")
        if layer and part in parts:
            layers.setdefault(layer, {})[part] = tensor
        else:
            others[name] = tensor
    return layers, others


def wrong_types(parts: Parts, wanted: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What is wrong with the types of those parts that are there."""
    return [
        f"{part} is stored as {parts[part].stored}, wanted {' or '.join(types)}"
        for part, types in wanted.items()
        if part in parts and parts[part].stored not in types
    ]
