"""The manifest of a graph's artifact: its inputs and outputs, and what their sizes must be. Reading it runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import schema
from llmc.runtime.loading.device_manifest import read_device_manifest
from llmc.runtime.loading.manifest import read_manifest
from llmc.runtime.loading.package import (
    DEVICES,
    GRAPH,
    MANIFEST,
    PACKAGE,
    Package,
    package_fields,
    package_problems,
    read_document,
)

DTYPES = (
    "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
)  # fmt: skip
MAX_RANK = 16
MAX_DEPTH = 32  # of an expression of sizes
OPERATIONS = ("add", "sub", "mul", "div", "mod", "min", "max")
_INT32 = 2**31 - 1

Term = Any  # a number, the name of a size, or [operation, term, term]


def _size(value: Any, where: str) -> list[str]:
    return schema.text(value, where) if isinstance(value, str) else schema.whole(1, _INT32)(value, where)


def _term(value: Any, where: str, depth: int = 0) -> list[str]:
    if isinstance(value, str):
        return []
    if isinstance(value, list) and len(value) == 3 and value[0] in OPERATIONS and depth < MAX_DEPTH:
        return _term(value[1], where, depth + 1) + _term(value[2], where, depth + 1)
    return schema.whole(-(2**62), 2**62)(value, where)


_INPUT = schema.record(name=schema.text, dtype=schema.one_of(*DTYPES), shape=schema.items(_size))
_OUTPUT = schema.record(name=schema.text, dtype=schema.one_of(*DTYPES), shape=schema.items(_term))
_SCHEMA = schema.record(
    **PACKAGE,
    task=schema.one_of(GRAPH),
    source=schema.text,
    operators=schema.items(schema.text),
    inputs=schema.items(_INPUT, 1),
    outputs=schema.items(_OUTPUT, 1),
    conditions=schema.items(schema.record(left=_term, relation=schema.one_of("equal", "at least"), right=_term)),
)


@dataclass(frozen=True)
class Port:
    """An input or an output. A size is a number, a name, or an expression of names."""

    name: str
    dtype: str
    shape: tuple[Term, ...]


@dataclass(frozen=True)
class Condition:
    """What sizes must be for the graph to mean anything: `left` is `right`, or at least that."""

    left: Term
    relation: str
    right: Term


@dataclass(frozen=True)
class GraphManifest(Package):
    """The checked manifest of a graph."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    conditions: tuple[Condition, ...]


def read_graph_manifest(folder: Path) -> GraphManifest:
    """The manifest in `folder`. Raises ArtifactError when it is not sound, or of a model of text."""
    raw = read_document(folder)
    path = folder / MANIFEST
    if raw.get("task") != GRAPH:
        raise ArtifactError(f"{folder}: a model of text, not a graph; give it a prompt, not arrays")
    problems = _SCHEMA(raw, "manifest")
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}; compile the graph again")
    conditions = tuple(Condition(**entry) for entry in raw["conditions"])
    manifest = GraphManifest(
        **package_fields(raw), inputs=_ports(raw["inputs"]), outputs=_ports(raw["outputs"]), conditions=conditions
    )
    problems = package_problems(manifest, []) + _contradictions(manifest)
    if problems:
        raise ArtifactError(f"{path}: {schema.listed(problems)}; compile the graph again")
    return manifest


_PORTS = ("inputs", "outputs")


def _ports(entries: list[dict[str, Any]]) -> tuple[Port, ...]:
    return tuple(Port(entry["name"], entry["dtype"], tuple(entry["shape"])) for entry in entries)


def _contradictions(manifest: GraphManifest) -> list[str]:
    problems = []
    for key in _PORTS:
        names = [port.name for port in getattr(manifest, key)]
        if len(set(names)) != len(names):
            problems.append(f"{key} names one twice")
    known = {size for port in manifest.inputs for size in port.shape if isinstance(size, str)}
    terms = [size for port in manifest.outputs for size in port.shape]
    terms += [term for condition in manifest.conditions for term in (condition.left, condition.right)]
    unknown = sorted({name for term in terms for name in names_in(term)} - known)
    if unknown:
        problems.append(f"sizes {', '.join(unknown[:5])} are those of no input")
    if any(len(port.shape) > MAX_RANK for port in (*manifest.inputs, *manifest.outputs)):
        problems.append(f"more than {MAX_RANK} dimensions")
    return problems


def names_in(term: Term) -> set[str]:
    """The sizes that an expression names."""
    if isinstance(term, list):
        return names_in(term[1]) | names_in(term[2])
    return {term} if isinstance(term, str) else set()


def value_of(term: Term, sizes: dict[str, int]) -> int:
    """The number that an expression of sizes is.

    >>> value_of(["add", "rows", ["mul", 2, 3]], {"rows": 4})
    10
    """
    if isinstance(term, str):
        return sizes[term]
    if not isinstance(term, list):
        return int(term)
    left, right = value_of(term[1], sizes), value_of(term[2], sizes)
    if term[0] in ("div", "mod"):
        if right == 0:
            raise ZeroDivisionError
        return left // right if term[0] == "div" else left % right
    return {"add": left + right, "sub": left - right, "mul": left * right, "min": min(left, right),
            "max": max(left, right)}[term[0]]  # fmt: skip


def words_of(term: Term) -> str:
    """An expression as people write it.

    >>> words_of(["min", ["mul", "rows", 2], 512])
    'min(rows * 2, 512)'
    """
    if not isinstance(term, list):
        return str(term)
    operation, left, right = term[0], words_of(term[1]), words_of(term[2])
    if operation in ("min", "max"):
        return f"{operation}({left}, {right})"
    return f"{left} {dict(add='+', sub='-', mul='*', div='//', mod='%')[operation]} {right}"


def read_any(folder: Path) -> Package:
    """The manifest in `folder`, whatever the artifact is for."""
    raw = read_document(folder)
    if raw.get("task") == GRAPH:
        return read_graph_manifest(folder)
    return read_device_manifest(folder) if DEVICES in raw else read_manifest(folder)
