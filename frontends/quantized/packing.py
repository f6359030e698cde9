"""What config.json's table of a quantizer becomes: something that makes one matrix of the tensors that hold it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from llmc.compiler.errors import SourceError
from llmc.frontends.quantized.folded_tensor import misfits
from llmc.frontends.tensor import Tensor

Parts = dict[str, Tensor]  # of one layer, by what follows its name
WEIGHT = "weight"
# What is said of activations and of the cache, for runtimes that round them so.
ACTIVATIONS = frozenset(
    f"{what}_{part}"
    for what in ("input", "output", "q", "k", "v")
    for part in ("scale", "zero_point", "global_scale")
)  # fmt: skip


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


def fold_layers(
    found: Mapping[str, Tensor], where: str, method: str, parts: Collection[str],
    make: Callable[[str, Parts], Tensor | str],
) -> dict[str, Tensor]:  # fmt: skip
    """One tensor LAYER.weight in place of those that hold it, a part of the same name among them.

    `make` gives the matrix of a layer, or what is wrong with its parts. ACTIVATIONS are left out. Raises SourceError
    listing what is wrong, or where nothing is quantized.
    """
    layers, others = by_layer(found, parts)
    result = {name: tensor for name, tensor in others.items() if name.rpartition(".")[2] not in ACTIVATIONS}
    if not layers:
        raise SourceError(f"{where}: quantized by {method}, but no tensor is; fetch the whole model")
    faults: dict[str, list[str]] = {}
    for layer, own in layers.items():
        name = f"{layer}.{WEIGHT}"
        if name in result:
            own[WEIGHT] = result.pop(name)
        made = make(name, own)
        if isinstance(made, Tensor):
            result[name] = made
        else:
            faults.setdefault(made, []).append(name)
    if faults:
        raise misfits(where, faults)
    return result


def wrong_types(parts: Parts, wanted: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What is wrong with the types of those parts that are there."""
    return [
        f"{part} is stored as {parts[part].stored}, wanted {' or '.join(types)}"
        for part, types in wanted.items()
        if part in parts and parts[part].stored not in types
    ]
