"""Writes an artifact for several devices: of each a library and weights of its own (docs/partition.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmc.compiler import artifact
from llmc.compiler.driver.compile import kv_kind, planned, write_texts
from llmc.compiler.driver.contents import write_contents
from llmc.compiler.driver.libraries import lowered
from llmc.compiler.driver.manifest import describe_model
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.shares import ShareSources
from llmc.compiler.driver.steps import steps_for
from llmc.compiler.driver.tuning.found import Found
from llmc.compiler.progress import Progress
from llmc.compiler.spec.parts import part_sizes

if TYPE_CHECKING:
    import llmc.targets.target as targets
    from llmc.compiler.driver.plan import Plan
    from llmc.compiler.evaluate import StoredWeight
    from llmc.passes.partition.part import Part


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
            weights, variants = write_contents(
                folder, stored, lambda report, shares=shares: ShareSources(plan.source(report), shares),  # type: ignore[misc]
                lambda target, steps=steps: lowered(steps[target], target, knobs),  # type: ignore[misc]
                own, request.tvm_runtime, report, f"weights.{part.rank}.safetensors", f".{part.rank}",
            )  # fmt: skip
            ranks.append(_describe(part, weights, variants))
            stored_by_any += stored
        functions = sorted(variable.name_hint for variable in steps[own[0]].functions)
        manifest = describe_model(
            model, plan.recipe, plan.scaled, kv_dtype, stored_by_any, ranks[0]["weights"],
            ranks[0]["variants"], functions, part_sizes(model.spec, request.layer_groups), request.activations,
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
