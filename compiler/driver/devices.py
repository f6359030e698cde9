"""Writes an artifact for several devices: of each a library and weights of its own (docs/partition.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import artifact
from llmc.compiler.driver.compile import Progress, kv_kind, planned, steps_for, write_texts
from llmc.compiler.driver.libraries import lowered, write_libraries
from llmc.compiler.driver.manifest import describe_model
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.driver.tuning.found import Found
from llmc.compiler.driver.write import write_weights
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, BlockFormat, Quantized, encode
from llmc.compiler.spec.parts import part_sizes

if TYPE_CHECKING:
    import llmc.targets.target as targets
    from llmc.compiler.driver.plan import Plan
    from llmc.compiler.evaluate import StoredWeight
    from llmc.passes.partition.part import Part, WeightShare
    from llmc.passes.partition.shares import Ranges


def write_devices(
    request: Request, chosen: Sequence[targets.AnyTarget], knobs: Found, model: Any, plan: Plan, report: Progress
) -> dict[str, Any]:
    """Write the artifact of a planned compile for the devices of the request; its manifest."""
    from llmc.frontends.graph.build import build
    from llmc.passes.partition import partition
    from llmc.targets.target import for_kind

    placement = request.placement
    assert placement is not None
    kv_dtype = kv_kind(request.kv, plan.recipe)
    ranks: list[dict[str, Any]] = []
    stored_by_any: list[StoredWeight] = []
    with artifact.new_artifact(request.output) as folder:
        for part in partition(build(model.spec, kv_dtype, request.layer_groups), placement):
            shares = {share.name: share for share in part.weights}
            own = for_kind(chosen, part.device.kind)
            stored, steps = steps_for(
                request, own,
                lambda exact, part=part, names=list(shares): (  # type: ignore[misc]
                    planned(part.module, names, plan.recipe, exact, report)
                ),
            )  # fmt: skip
            source = ShareSources(plan.source, shares)
            weights = write_weights(folder, stored, source, report, f"weights.{part.rank}.safetensors")
            variants = write_libraries(
                folder, lambda target, steps=steps: lowered(steps[target], target, knobs),  # type: ignore[misc]
                own, request.tvm_runtime, report, f".{part.rank}",
            )  # fmt: skip
            ranks.append(_describe(part, weights, variants))
            stored_by_any += stored
        functions = sorted(variable.name_hint for variable in steps[own[0]].functions)
        manifest = describe_model(
            model, plan.recipe, kv_dtype, stored_by_any, ranks[0]["weights"], ranks[0]["variants"], functions,
            part_sizes(model.spec, request.layer_groups),
        )  # fmt: skip
        manifest["devices"] = {"placement": str(placement), "ranks": ranks}
        report("write", 0, 1)
        write_texts(folder, model, manifest)
        artifact.write_manifest(folder, manifest)
    return manifest


def _describe(part: Part, weights: dict[str, Any], variants: list[dict[str, Any]]) -> dict[str, Any]:
    """What the manifest says of a device."""
    (kv_heads,) = set(part.kv_heads)  # a spec has one number for all its layers, and a device one share of all of them
    return {
        "stage": part.stage, "device": str(part.device), "layers": list(part.layers), "kv_heads": kv_heads,
        "outputs": {name: list(numbers) for name, numbers in sorted(part.outputs.items())},
        "variants": variants, "weights": weights,
    }  # fmt: skip


@dataclass(frozen=True)
class ShareSources:
    """`Sources` of compiler/evaluate.py: a device's shares of a model's weights."""

    whole: ModelSources
    shares: dict[str, WeightShare]

    def read(self, name: str) -> NDArray[np.float32]:
        """The share's values."""
        return self.shares[name].of(self.whole.read(name))

    def pack(self, format: str, names: tuple[str, ...]) -> NDArray[Any]:
        """The packed shares of matrices, one under another: of block formats with the codes that the whole would have.

        Where a share does not begin and end with blocks of the whole, it is quantized as a matrix of its own.
        """
        kind, shares = FORMATS[format], [self.shares[name] for name in names]
        rows, columns = sum(share.shape[0] for share in shares), shares[0].shape[1]
        if isinstance(kind, BlockFormat):
            whole = self.whole.quantized(kind, names)
            quantized = _taken(whole, kind, _rows(shares), _columns(shares), shares[0].whole[1])
            if quantized is not None:
                self.whole.count(rows * columns)
                return encode(kind, quantized, rows, columns)
        return kind.pack(np.concatenate([self.read(name) for name in names]))


def _rows(shares: list[WeightShare]) -> NDArray[np.int64]:
    """The rows of the shares in the matrices one under another."""
    first, found = 0, []
    for share in shares:
        ranges = share.ranges if share.axis == 0 else ((0, share.whole[0]),)
        found += [np.arange(first + begin, first + end) for begin, end in ranges]
        first += share.whole[0]
    return np.concatenate(found)


def _columns(shares: list[WeightShare]) -> Ranges | None:
    """The columns that shares of a stack have; None for all."""
    found = {share.ranges if share.axis == 1 else None for share in shares}
    if len(found) > 1:
        raise LlmcError(f"{shares[0].name}: matrices one under another whose columns are not the same")
    return found.pop()


def _taken(
    whole: Quantized, kind: BlockFormat, rows: NDArray[np.int64], ranges: Ranges | None, columns: int
) -> Quantized | None:
    """Rows and columns of a quantized matrix of so many columns; None where they would cut its records."""
    codes, tables = whole.codes[rows], {name: table[rows] for name, table in whole.tables.items()}
    if ranges is None or ranges == ((0, columns),):
        return Quantized(codes, tables)
    unit = kind.columns
    if any(begin % unit or (end % unit and end != columns) for begin, end in ranges):
        return None
    records = np.concatenate([np.arange(begin // unit, -(-end // unit)) for begin, end in ranges])

    def picked(array: NDArray[Any]) -> NDArray[Any]:
        if array.ndim == 1:  # scales of rows: scales of blocks are relative to them
            return array
        by_record = array.reshape(len(array), -(-columns // unit), -1)
        return np.ascontiguousarray(by_record[:, records].reshape(len(array), -1))

    return Quantized(picked(codes), {name: picked(table) for name, table in tables.items()})
