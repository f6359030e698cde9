"""What a compile was asked for, checked before any work."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import llmc.targets.target as targets
from llmc.compiler import artifact
from llmc.compiler.driver.budget import Budget
from llmc.compiler.driver.tvm_runtime import CUDA_RUNTIME, find_runtime
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, OFFERED
from llmc.compiler.kv_pages import KINDS
from llmc.compiler.placement import Placement, parse_placement
from llmc.compiler.spec import ModelSpec, from_toml
from llmc.compiler.text_file import read_text
from llmc.targets.cuda.nvcc import find_nvcc
from llmc.targets.cuda.target import CudaTarget

GRAPHS = (".onnx", ".pt2")  # files whose source is a graph
KV_DTYPES = ("auto", *KINDS)
ACTIVATIONS = ("auto", "i8", "f32", "bf16")


@dataclass(frozen=True)
class Request:
    """The arguments of `compile_model`."""

    source: str | Path
    output: Path
    quant: str = "auto"
    kv: str = "auto"
    target: str = "cpu"
    spec: Path | None = None
    bpw: float | None = None
    size: int | None = None
    calib: Path | None = None
    recipe: Path | None = None
    activations: str = "auto"
    check: bool = False
    equalize: bool = False
    seed: int = 0
    layer_groups: int | None = None
    tuned: Path | None = None
    tvm_runtime: Path | None = None
    devices: str | None = None
    split: str | None = None

    @property
    def measures(self) -> bool:
        """Whether the result is compared with the unquantized model."""
        return self.check or self.calib is not None or self.bpw is not None or self.size is not None

    @property
    def floats(self) -> bool:
        """Whether activations are to stay floats, of whatever size, on every target."""
        return self.activations in ("f32", "bf16")

    def exact(self, target: targets.AnyTarget) -> bool:
        """Whether code for a target leaves activations floats."""
        return self.floats or not target.int8_activations

    def rounds_to_bf16(self, target: targets.AnyTarget) -> bool:
        """Whether what codes are multiplied with is rounded to bfloat16."""
        return self.activations == "bf16" or (self.activations != "f32" and target.bf16_activations)

    @property
    def placement(self) -> Placement | None:
        """The devices that the model is cut for; None for a model that is left whole."""
        found = None if self.devices is None else parse_placement(self.devices, self.split)
        return None if found is None or found.kind == "whole" else found

    def budget(self, weights: int) -> Budget | None:
        """The most bytes, for a model of so many weights."""
        if self.bpw is not None:
            return Budget(self.bpw * weights / 8, f"--bpw {self.bpw:g}")
        return None if self.size is None else Budget(self.size, f"--size {self.size / 1e6:g}MB")


def check_request(request: Request) -> tuple[targets.AnyTarget, ...]:
    """The targets, best first, when all that can be known before the model is read makes sense; else LlmcError."""
    chosen = check_choices(request)
    artifact.check_output(request.output)
    return chosen


def check_choices(request: Request) -> tuple[targets.AnyTarget, ...]:
    """The same of everything but where the artifact goes."""
    if request.quant != "auto" and request.quant not in OFFERED:
        kept = " (it only keeps what a checkpoint stores in it: auto does)" if request.quant in FORMATS else ""
        raise LlmcError(f"unknown weight format {request.quant!r}{kept}; llmc knows: auto, {', '.join(OFFERED)}")
    if request.kv not in KV_DTYPES:
        raise LlmcError(f"unknown KV format {request.kv!r}; llmc knows: {', '.join(KV_DTYPES)}")
    if request.activations not in ACTIVATIONS:
        raise LlmcError(f"unknown activations {request.activations!r}; llmc knows: {', '.join(ACTIVATIONS)}")
    asked = {"quant": request.quant != "auto", "bpw": request.bpw is not None, "size": request.size is not None,
             "recipe": request.recipe is not None}  # fmt: skip
    if sum(asked.values()) > 1:
        named = " and ".join(f"--{name}" for name, given in asked.items() if given)
        raise LlmcError(f"{named} each choose the formats; give one of them")
    if request.bpw is not None and not 0 < request.bpw <= 32:
        raise LlmcError(f"--bpw {request.bpw:g}: wanted more than 0 and at most 32 bits per weight")
    if request.size is not None and request.size <= 0:
        raise LlmcError(f"--size {request.size}: wanted a positive number of bytes")
    chosen = targets.get(request.target)
    _check_devices(request, chosen)
    for target in targets.gpus(chosen):
        _check_cuda(request, target, alone=not targets.cpus(chosen))
    linker, arch = chosen[0].linker, chosen[0].arch
    if shutil.which(linker) is None:
        raise LlmcError(f"{linker} is needed to link code for {arch} and is not on PATH; install it")
    find_runtime(arch, request.tvm_runtime)
    return chosen


def _check_cuda(request: Request, target: CudaTarget, alone: bool) -> None:
    """What CUDA targets cannot do yet, and what they need; `alone`: there are none for CPUs beside it."""
    if request.activations == "i8" and alone:
        raise LlmcError(f"--activations i8: kernels of {target.name} multiply floats; leave it out")
    wrong = {"--tuned": alone and request.tuned, "a graph": Path(request.source).suffix in GRAPHS}
    for name, given in wrong.items():
        if given and (name != "a graph" or request.spec is None):
            raise LlmcError(f"{name}: not for {target.name} so far; compile it for a CPU")
    find_runtime(target.arch, request.tvm_runtime, CUDA_RUNTIME)
    find_nvcc()


def _check_devices(request: Request, chosen: tuple[targets.AnyTarget, ...]) -> None:
    """Whether each device can have code: of the targets, those of its kind."""
    if request.devices is None and request.split is not None:
        raise LlmcError(f"--split {request.split[:200]}: of no devices; give --devices too")
    if request.devices is None:
        return
    devices = [device for stage in parse_placement(request.devices, request.split).stages for device in stage]
    without = [str(device) for device in devices if not targets.for_kind(chosen, device.kind)]
    if without:
        raise LlmcError(
            f"--devices: {', '.join(without)}: --target {request.target} makes no code for it; name targets of all "
            "kinds of devices, as --target cuda:sm_90,cpu"
        )
    if targets.cpus(chosen) and targets.gpus(chosen) and not all(device.kind for device in devices):
        raise LlmcError(
            f"--devices {request.devices}: numbers alone, and --target names CPUs and GPUs; say cpu or cuda:0"
        )
    idle = [each.name for each in chosen if not any(each in targets.for_kind(chosen, d.kind) for d in devices)]
    if idle and request.placement is not None:
        raise LlmcError(f"--target: {', '.join(idle)}: for no device of --devices {request.devices}; leave it out")
    if request.placement is None:
        return
    if request.layer_groups is not None:
        raise LlmcError("--layer-groups and --devices: the step in parts is for one device so far")
    if request.check:
        raise LlmcError("--check: one process cannot run an artifact for several devices; check the whole model's")


def read_spec(path: Path) -> ModelSpec:
    """The spec in a TOML file."""
    text = read_text(path, "the spec")
    try:
        return from_toml(text)
    except LlmcError as error:
        raise LlmcError(f"{path}: {error}") from error
