"""Which format each matrix is stored in: from one name, from a file, or kept as the checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, OFFERED, BlockFormat
from llmc.compiler.spec import ModelSpec, tensor_shapes
from llmc.compiler.spec.tensors import is_router
from llmc.compiler.text_file import parse_toml, read_text

Recipe = dict[str, str]  # our name of a matrix -> its format
FALLBACK = "q8"  # of floats when nothing is asked for: within rounding of the source
ROUTER = "f32"  # of routers: few weights, and a rounded one sends tokens to other experts
RECIPE_LIMIT = 1 << 22  # characters of a recipe file

# Below 5 bits the vocabulary's table, which every token passes twice when tied, costs most quality per bit saved.
VOCABULARY = {"embedding", "positions", "head", "encoder.embedding", "encoder.positions"}
_LEAST_VOCABULARY = {"f16": "q8", "row": "c6"}  # by how the format stores scales: ours go with ours
_LEAST_ROTATED = "r6"


def matrix_names(spec: ModelSpec) -> list[str]:
    """Our names of the weights that have a format: those of two dimensions that something is multiplied with."""
    shapes = tensor_shapes(spec).items()
    return [name for name, shape in shapes if len(shape) == 2 and not name.endswith("relative_bias")]


def uniform(spec: ModelSpec, quant: str) -> Recipe:
    """One format for all; the vocabulary's table gets no less than about 6 bits, routers of experts stay float32."""
    return {name: _uniform(name, quant) for name in matrix_names(spec)}


def _uniform(name: str, quant: str) -> str:
    if is_router(name):
        return ROUTER
    return _for_vocabulary(quant) if name in VOCABULARY else quant


def _for_vocabulary(quant: str) -> str:
    format = FORMATS[quant]
    if isinstance(format, BlockFormat) and format.code_bits < 5:
        return _LEAST_ROTATED if format.rotated else _LEAST_VOCABULARY[format.scale]
    return quant


def keep(model: Any) -> Recipe:
    """Each matrix as the checkpoint stores it where a format of ours holds that without loss, else `FALLBACK`."""
    return {
        name: ROUTER if is_router(name) else model.tensors[name].kept or FALLBACK for name in matrix_names(model.spec)
    }


def read_recipe(path: Path, model: Any) -> Recipe:
    """The recipe in a TOML file (`recipe_text`). Raises LlmcError naming every fault.

    `default` is for matrices that `[formats]` does not list. A kept format is refused where the checkpoint has another.
    """
    plain = parse_toml(read_text(path, "the recipe"), str(path), RECIPE_LIMIT)
    listed, default = plain.pop("formats", {}), plain.pop("default", None)
    names = matrix_names(model.spec)
    faults = [f"unknown key {key!r}" for key in plain]
    if not isinstance(listed, dict):
        raise LlmcError(f'{path}: formats is no table; wanted [formats] and lines of "matrix" = "format"')
    faults += [f"no matrix {name!r}" for name in listed if name not in names]
    missing = [name for name in names if name not in listed]
    if missing and default is None:
        faults.append(f"no default, and no format for {_some(missing)}")
    asked = {name: listed.get(name, default) for name in names}
    faults += _format_faults(asked, model)
    if faults:
        raise LlmcError(f"{path}: " + "; ".join(faults))
    return {name: model.tensors[name].kept if format == "keep" else format for name, format in asked.items()}


def _format_faults(asked: dict[str, Any], model: Any) -> list[str]:
    known = [*OFFERED, "keep"]
    faults = []
    for name, format in asked.items():
        kept = model.tensors[name].kept
        if format == "keep" and kept is None:
            faults.append(f"{name} cannot be kept: the checkpoint stores {model.tensors[name].stored}")
        elif format is not None and format not in known and format != kept:
            faults.append(f"{name} = {format!r}, llmc knows: {', '.join(known)}")
    return faults


def recipe_text(recipe: Recipe) -> str:
    """The TOML that `read_recipe` reads back to the same recipe."""
    return "[formats]\n" + "".join(f'"{name}" = "{format}"\n' for name, format in recipe.items())


def describe(formats: Iterable[str]) -> str:
    """One word for a recipe: its format when there is one beside the vocabulary's, else "mixed"."""
    distinct = list(dict.fromkeys(formats))
    return distinct[0] if len(distinct) == 1 else "mixed"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
