"""The kernels of a model that have something to tune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm import tirx

from llmc.compiler.driver.compile import kv_kind, planned_step
from llmc.compiler.driver.compile_graph import graph_step, is_graph
from llmc.compiler.driver.plan import make_plan
from llmc.compiler.driver.request import Request, read_spec
from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import from_dict
from llmc.frontends.source import open_model
from llmc.runtime.loading.manifest import read_manifest
from llmc.runtime.loading.package import MANIFEST
from llmc.targets.knobs import CANDIDATES, Knobs, Watched
from llmc.targets.lower import KernelCall, kernel_calls, make_kernel
from llmc.targets.target import Target
from llmc.targets.tuned import shipped


@dataclass(frozen=True)
class Kernel:
    """One kernel of a model: which knobs its code asks for, and what they are without a database."""

    key: str
    call: KernelCall
    knobs: tuple[str, ...]
    default: Knobs

    def function(self, target: Target, knobs: Knobs) -> tirx.PrimFunc:
        """Its code with these knobs."""
        return make_kernel(self.call.name, replace(target, knobs=knobs), self.call.shapes, self.call.attrs)

    @property
    def shape(self) -> str:
        """What tells it from others of its op: its greatest operand, and what it gives."""
        shapes = self.key.partition(": ")[2].split()
        places = range(len(self.call.shapes))
        return f"{shapes[max(places, key=lambda i: _elements(self.call.shapes[i]))]} -> {shapes[-1]}"

    @property
    def weight(self) -> int:
        """About how much of a step's time is spent in it: elements of fixed shapes, over all calls.

        Operands whose size the step decides, such as activations, are small beside weights.
        """
        return self.call.count * max(map(_elements, self.call.shapes))


def _elements(shape: list[Any]) -> int:
    total = 1
    for size in shape:
        total *= int(size) if isinstance(size, (int, tirx.IntImm)) else 1
    return total


def tunable(calls: Mapping[str, KernelCall], target: Target) -> list[Kernel]:
    """Those whose code asks for a knob with more than one value, the heaviest first."""
    kernels, usual = [], shipped(target)
    for key, call in calls.items():
        watched = Watched(**vars(target.knobs))
        make_kernel(call.name, replace(target, knobs=watched), call.shapes, call.attrs)
        knobs = tuple(name for name in watched.read() if len(CANDIDATES[name]) > 1)
        if knobs:
            kernels.append(Kernel(key, call, knobs, usual.knobs(target.knobs, call.name, call.shapes, call.attrs)))
    return sorted(kernels, key=lambda kernel: (-kernel.weight, kernel.key))


def model_calls(request: Request, report: Any) -> tuple[str, dict[str, KernelCall]]:
    """The model's name and the kernels its artifact has or would have; weights are not read.

    The source is what `llmc compile` takes, or an artifact, whose formats then count.
    """
    if (Path(request.source) / MANIFEST).is_file():
        return _of_artifact(request, report)
    if is_graph(request):
        return Path(request.source).name, kernel_calls(graph_step(request)[3], plain=False)
    model = open_model(request.source, None if request.spec is None else read_spec(request.spec), report)
    try:
        recipe = make_plan(request, (), model, report).recipe
        kind = kv_kind(request.kv, recipe)
        _, step = planned_step(model.spec, recipe, kind, None, request.activations == "f32", report)
        return model.spec.name, kernel_calls(step)
    finally:
        model.close()


def _of_artifact(request: Request, report: Any) -> tuple[str, dict[str, KernelCall]]:
    given = {"--quant": request.quant != "auto", "--kv": request.kv != "auto", "--recipe": request.recipe is not None,
             "--spec": request.spec is not None}  # fmt: skip
    if any(given.values()):
        named = " and ".join(name for name, is_given in given.items() if is_given)
        raise LlmcError(f"{request.source}: {named}: an artifact has its formats already; leave it out")
    manifest = read_manifest(Path(request.source))
    spec, recipe = from_dict(manifest.raw["spec"]), manifest.raw["quantization"]["formats"]
    own = manifest.raw["quantization"].get("activations", "auto")  # of artifacts from before it was noted: unknown
    asked = own if request.activations == "auto" else request.activations
    if asked == "bf16":
        raise LlmcError(f"{request.source}: compiled with --activations bf16, whose kernels llmc tune does not know")
    exact = asked == "f32"
    _, step = planned_step(spec, recipe, manifest.kv.dtype, len(manifest.parts) or None, exact, report)
    return manifest.raw["name"], kernel_calls(step)
