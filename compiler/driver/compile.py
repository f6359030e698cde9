"""compile_model: model files -> graph -> passes -> weights and machine code -> artifact, read top to bottom."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from llmc.compiler import artifact, pipeline
from llmc.compiler.driver.request import Request, check_request, read_spec
from llmc.compiler.spec import ModelSpec, tensor_shapes

if TYPE_CHECKING:
    import llmc.targets.target as targets
    from llmc.compiler.driver.check import Loss
    from llmc.compiler.driver.plan import Plan
    from llmc.compiler.driver.sources import ModelSources
    from llmc.compiler.evaluate import StoredWeight

Progress = Callable[[str, int, int], None]
PACKING_THREADS = 2  # packing is NumPy on large arrays, which runs without the interpreter lock


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


def compile_model(
    source: str | Path, output: str | Path, *, quant: str = "auto", kv: str = "auto", target: str = "cpu",
    spec: str | Path | None = None, bpw: float | None = None, size: int | None = None,
    calib: str | Path | None = None, recipe: str | Path | None = None, activations: str = "auto",
    check: bool = False, seed: int = 0, progress: Progress | None = None,
) -> CompileResult:  # fmt: skip
    """Compile the model at `source` into the artifact folder `output`.

    `quant` is a name in `OFFERED`, or "auto": what the checkpoint has quantized is kept as it is, floats become q8.
    Instead, `bpw` (bits per weight) or `size` (bytes of weights) let measurements choose a format for each matrix, and
    `recipe` names a TOML file that lists them. `calib` is a text file: what the model computes while it reads windows
    of it, chosen by `seed`, decides which errors matter. `kv` "auto" stores keys and values as float32 for float32
    weights, else bfloat16. `activations` "f32" does without rounding to int8. `check` compares the result with the
    unquantized model. `spec` is a TOML file that replaces the derived spec. Raises LlmcError, before any work, for what
    is not understood.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    request = Request(
        source, Path(output), quant, kv, target, _path(spec), bpw, size, _path(calib), _path(recipe), activations,
        check, seed,
    )  # fmt: skip
    chosen = check_request(request)
    from llmc.compiler.driver.plan import make_plan
    from llmc.frontends.source import open_model  # imports tvm and readers: only once the request makes sense

    report("read", 0, 1)
    model = open_model(source, None if request.spec is None else read_spec(request.spec))
    try:
        report("read", 1, 1)
        manifest, loss = write_artifact(request, chosen, model, make_plan(request, model, report), report)
    finally:
        model.close()
    report("write", 1, 1)
    written = sum(file.stat().st_size for file in request.output.rglob("*") if file.is_file())
    about = manifest["quantization"]
    return CompileResult(
        request.output, time.perf_counter() - started, written, about["bits_per_weight"], about["format"],
        about["formats"], loss,
    )  # fmt: skip


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def write_artifact(
    request: Request, target: targets.Target, model: Any, plan: Plan, report: Progress
) -> tuple[dict[str, Any], Loss | None]:
    """Write the artifact of a planned compile; its manifest, and what was measured."""
    from llmc.compiler.driver.manifest import describe_model

    floats = set(plan.recipe.values()) == {"f32"}
    kv_dtype = ("f32" if floats else "bf16") if request.kv == "auto" else request.kv
    stored, step = _graph(model.spec, plan.recipe, kv_dtype, request.activations == "f32", report)
    with artifact.new_artifact(request.output) as folder:
        weights = _write_weights(folder, stored, plan.source, report)
        variant = _write_library(folder, step, target, report)
        report("write", 0, 1)
        manifest = describe_model(model, plan.recipe, kv_dtype, stored, weights, variant)
        _write_texts(folder, model, manifest)
        artifact.write_manifest(folder, manifest)
        loss = plan.measure(folder, target, report)
        if loss is not None:
            manifest["quantization"]["loss"] = loss.as_dict()
            artifact.write_manifest(folder, manifest)
    return manifest, loss


def _graph(
    spec: ModelSpec, recipe: dict[str, str], kv_dtype: str, exact: bool, report: Progress
) -> tuple[list[StoredWeight], Any]:
    """The stored weights, in the order the step takes them, and the module of the step alone."""
    from llmc.compiler.evaluate import stored_weights
    from llmc.frontends.graph.build import build
    from llmc.passes import lift_weights
    from llmc.passes.pipeline import stages

    module = pipeline.run(stages(recipe.__getitem__, exact), build(spec, kv_dtype), report)
    names = list(tensor_shapes(spec))
    stored = list(stored_weights(module[lift_weights.TRANSFORM], names))
    return stored, lift_weights.bundle_weights(module)


def _write_weights(folder: Path, stored: list[StoredWeight], source: ModelSources, report: Progress) -> dict[str, Any]:
    from threadpoolctl import threadpool_limits

    def arrays() -> Iterator[NDArray[Any]]:
        """In order, computed a few ahead: memory holds `PACKING_THREADS` + 1 weights at most."""
        # A BLAS of many threads would make the small products of compensation wait for one another, ten times as long.
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(PACKING_THREADS) as pool:
            ahead = [pool.submit(w.compute, source) for w in stored[:PACKING_THREADS]]
            for number in range(len(stored)):
                result = ahead.pop(0).result()
                if number + PACKING_THREADS < len(stored):
                    ahead.append(pool.submit(stored[number + PACKING_THREADS].compute, source))
                yield result

    path = folder / artifact.WEIGHTS
    return artifact.write_weights(path, stored, arrays(), lambda done: report("weights", done, len(stored)))


def _write_library(folder: Path, step: Any, target: targets.Target, report: Progress) -> dict[str, Any]:
    """Machine code for one target, and TVM's runtime beside it; the manifest's entry of the variant."""
    import tvm

    from llmc.targets.build import compile_module
    from llmc.targets.lower import lower

    report("library", 0, 2)
    lowered = lower(step, target)
    report("library", 1, 2)
    name = f"lib/{target.name}.so"
    compile_module(lowered, target).export_library(str(folder / name), cc=target.linker)
    shutil.copyfile(Path(tvm.__file__).parent / "lib" / "libtvm_runtime.so", folder / "lib" / "libtvm_runtime.so")
    report("library", 2, 2)
    return {"file": name, "name": target.name, "arch": target.arch, "requires": list(target.requires)}


def _write_texts(folder: Path, model: Any, manifest: dict[str, Any]) -> None:
    (folder / manifest["tokenizer"]).write_bytes(model.tokenizer_json)
    if manifest["chat_template"]:
        (folder / manifest["chat_template"]).write_text(model.chat_template, encoding="utf-8")
