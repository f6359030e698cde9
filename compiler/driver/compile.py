"""compile_model: model files -> graph -> passes -> weights and machine code -> artifact, read top to bottom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler import artifact, pipeline
from llmc.compiler.driver.compile_graph import is_graph, write_graph
from llmc.compiler.driver.contents import write_contents
from llmc.compiler.driver.libraries import lowered
from llmc.compiler.driver.request import Request, check_request, read_spec
from llmc.compiler.driver.steps import steps_for
from llmc.compiler.driver.tuning.found import Found
from llmc.compiler.errors import LlmcError
from llmc.compiler.meaning.convolution import KINDS as CONVOLVED
from llmc.compiler.progress import Progress
from llmc.compiler.spec import ModelSpec, tensor_shapes
from llmc.compiler.spec.parts import part_sizes
from llmc.targets.target import cpus

if TYPE_CHECKING:
    import llmc.targets.target as targets
    from llmc.compiler.driver.check import Loss
    from llmc.compiler.driver.plan import Plan
    from llmc.compiler.evaluate import StoredWeight


@dataclass(frozen=True)
class CompileResult:
    """What was made."""

    path: Path
    seconds: float
    bytes: int  # of the whole folder
    bits_per_weight: float  # of all stored tensors, scales, padding and norms included
    format: str  # of the matrices beside the vocabulary's, or "mixed"
    formats: dict[str, str]  # matrix -> format: the recipe
    loss: Loss | None  # what it costs, when that was measured
    tuned: str | None = None  # what came of the database of knobs, when one was given
    slow: tuple[str, ...] = ()  # of its formats those that one of its CPUs looks up slowly


def compile_model(
    source: str | Path, output: str | Path, *, quant: str = "auto", kv: str = "auto", target: str = "cpu",
    spec: str | Path | None = None, bpw: float | None = None, size: int | None = None,
    calib: str | Path | None = None, recipe: str | Path | None = None, activations: str = "auto",
    check: bool = False, equalize: bool = False, seed: int = 0, layer_groups: int | None = None,
    tuned: str | Path | None = None, tvm_runtime: str | Path | None = None, devices: str | None = None,
    split: str | None = None, progress: Progress | None = None,
) -> CompileResult:  # fmt: skip
    """Compile the model at `source` into the artifact folder `output`.

    `quant` is a name in `OFFERED`, or "auto": what the checkpoint has quantized is kept as it is, floats become q8.
    Instead, `bpw` (bits per weight) or `size` (bytes of weights) let measurements choose a format for each matrix, and
    `recipe` names a TOML file that lists them. `calib` is a text file: what the model computes while it reads windows
    of it, chosen by `seed`, decides which errors matter. `kv` "auto" stores keys and values as float32 for float32
    weights, else bfloat16. `activations` "f32" rounds none; "auto" rounds to int8 or bfloat16, as kernels take them.
    `check` compares the result with the unquantized model. `equalize` lets that one read a short text of ours (or
    `calib`), and scales columns that something else can be divided for, so that they lose less by rounding; the
    command does both unless told otherwise. `layer_groups` adds the step in so many parts, for
    `llmc.load(prefill="layered")`. `tuned` is a database of `llmc tune`: kernels it knows get their knobs from there,
    others what is shipped. `tvm_runtime` is where TVM's runtime for another architecture is: an apache-tvm wheel, or
    its libtvm_runtime.so. `devices` cuts the model for several (docs/partition.md), `split` says how much of it each
    takes. `spec` is a TOML file that replaces the derived spec. Raises LlmcError, before any work, for what is not
    understood.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    request = Request(
        source, Path(output), quant, kv, target, _path(spec), bpw, size, _path(calib), _path(recipe), activations,
        check, equalize, seed, layer_groups, _path(tuned), _path(tvm_runtime), devices, split,
    )  # fmt: skip
    chosen = check_request(request)
    knobs = Found(request.tuned)
    if is_graph(request):
        manifest, loss = write_graph(request, cpus(chosen), knobs, report), None
    else:
        manifest, loss = _model_artifact(request, chosen, knobs, report)
    report("write", 1, 1)
    written = sum(file.stat().st_size for file in request.output.rglob("*") if file.is_file())
    about = manifest["quantization"]
    return CompileResult(
        request.output, time.perf_counter() - started, written, about["bits_per_weight"], about["format"],
        about["formats"], loss, knobs.note(), _slow(about["formats"], chosen),
    )  # fmt: skip


def _slow(formats: dict[str, str], chosen: Sequence[targets.AnyTarget]) -> tuple[str, ...]:
    used = sorted(set(formats.values()))
    return tuple(name for name in used if any(target.looks_up_slowly(name) for target in cpus(chosen)))


def _model_artifact(
    request: Request, chosen: Sequence[targets.AnyTarget], knobs: Found, report: Progress
) -> tuple[dict[str, Any], Loss | None]:
    """Read the model, choose formats, write; the manifest, and what was measured."""
    from llmc.compiler.driver.plan import make_plan
    from llmc.frontends.source import open_model  # imports tvm and readers: only once the request makes sense
    from llmc.runtime.engine.freed_memory import give_back

    report("read", 0, 1)
    model = open_model(request.source, None if request.spec is None else read_spec(request.spec), report)
    give_back()  # what a vocabulary took while it was read
    try:
        report("read", 1, 1)
        part_sizes(model.spec, request.layer_groups)  # a wish that cannot be met is refused before any work
        _check_convolutions(model.spec, request)
        plan = make_plan(request, chosen, model, report)
        if request.placement is not None:
            from llmc.compiler.driver.devices import write_devices

            return write_devices(request, chosen, knobs, model, plan, report), None
        return write_artifact(request, chosen, knobs, model, plan, report)
    finally:
        model.close()


def _check_convolutions(spec: ModelSpec, request: Request) -> None:
    """Raises LlmcError for what a model with convolutions cannot do."""
    if spec.convolution is None:
        return
    if request.kv not in ("auto", *CONVOLVED):
        raise LlmcError(f"--kv {request.kv}: a model with convolutions keeps {' or '.join(CONVOLVED)}; leave it out")
    if request.placement is not None and any(len(stage) > 1 for stage in request.placement.stages):
        raise LlmcError(f"--devices {request.placement}: a model with convolutions is divided by layer only, as 0;1")


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def write_artifact(
    request: Request, chosen: Sequence[targets.AnyTarget], knobs: Found, model: Any, plan: Plan, report: Progress
) -> tuple[dict[str, Any], Loss | None]:
    """Write the artifact of a planned compile, with a library for each target; its manifest, and what was measured."""
    from llmc.compiler.driver.manifest import describe_model
    from llmc.runtime.loading.integrity import remember_for

    kv_dtype = kv_kind(request.kv, plan.recipe)
    parts = part_sizes(model.spec, request.layer_groups)
    stored, steps = steps_for(
        request, chosen,
        lambda exact: planned_step(model.spec, plan.recipe, kv_dtype, request.layer_groups, exact, report),
    )  # fmt: skip
    with artifact.new_artifact(request.output) as folder:
        weights, variants = write_contents(
            folder, stored, plan.source, lambda target: lowered(steps[target], target, knobs), chosen,
            request.tvm_runtime, report,
        )  # fmt: skip
        report("write", 0, 1)
        functions = sorted(variable.name_hint for variable in steps[chosen[0]].functions)
        manifest = describe_model(
            model, plan.recipe, plan.scaled, kv_dtype, stored, weights, variants, functions, parts, request.activations
        )
        write_texts(folder, model, manifest)
        written = artifact.write_manifest(folder, manifest)
        loss = plan.measure(folder, chosen, report)
        if loss is not None:
            manifest["quantization"]["loss"] = loss.as_dict()
            final = artifact.write_manifest(folder, manifest, written["files"])
            remember_for(folder / weights["file"], written["manifest_sha256"], final["manifest_sha256"])
    return manifest, loss


def kv_kind(asked: str, recipe: dict[str, str]) -> str:
    """How keys and values are stored: as asked for, else float32 beside float32 weights and bfloat16 beside others."""
    floats = set(recipe.values()) == {"f32"}
    return ("f32" if floats else "bf16") if asked == "auto" else asked


def planned_step(
    spec: ModelSpec, recipe: dict[str, str], kv_dtype: str, groups: int | None, exact: bool, report: Progress
) -> tuple[list[StoredWeight], Any]:
    """The stored weights, in the order the functions take them, and the module of these functions alone.

    `groups` of layers are functions too; `exact`: activations are not rounded to int8.
    """
    from llmc.frontends.graph.build import build

    return planned(build(spec, kv_dtype, groups), list(tensor_shapes(spec)), recipe, exact, report)


def planned(
    module: Any, names: list[str], recipe: dict[str, str], exact: bool, report: Progress
) -> tuple[list[StoredWeight], Any]:
    """`planned_step` of a module; `names` are its weights' in the order of its functions' parameters."""
    from llmc.passes import lift_weights
    from llmc.passes.pipeline import stages

    module = pipeline.run(stages(recipe.__getitem__, exact), module, report)
    return lift_weights.stored_by_all(module, names), lift_weights.bundle_weights(module)


def write_texts(folder: Path, model: Any, manifest: dict[str, Any]) -> None:
    """The files that the manifest names beside libraries and weights."""
    (folder / manifest["tokenizer"]).write_bytes(model.tokenizer_json)
    if manifest["chat_template"]:
        (folder / manifest["chat_template"]).write_text(model.chat_template, encoding="utf-8")
