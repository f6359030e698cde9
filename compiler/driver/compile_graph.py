"""write_graph: an exported graph (ONNX, torch.export) -> its weights and machine code -> artifact, top to bottom."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import artifact
from llmc.compiler.driver.contents import write_contents
from llmc.compiler.driver.recipe import describe
from llmc.compiler.driver.request import GRAPHS, Request
from llmc.compiler.driver.steps import step_for
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS

if TYPE_CHECKING:
    import llmc.targets.target as targets
    from llmc.compiler.driver.tuning.found import Found
    from llmc.compiler.evaluate import StoredWeight
    from llmc.frontends.importers.imported import Imported
    from llmc.passes.take_packed import Packed

_TEXT_ONLY = ("spec", "bpw", "size", "calib", "recipe", "layer_groups")  # options that need a model of text


def is_graph(request: Request) -> bool:
    """Whether the source is a graph to be compiled as it is; with a spec an ONNX file is a container of weights."""
    return Path(request.source).suffix in GRAPHS and Path(request.source).is_file() and request.spec is None


def write_graph(request: Request, chosen: Sequence[targets.Target], knobs: Found, report: Any) -> dict[str, Any]:
    """Write the artifact of a graph; its manifest."""
    report("read", 0, 1)
    graph, recipe, stored, step = graph_step(request)
    report("read", 1, 1)
    with artifact.new_artifact(request.output) as folder:
        weights, variants = write_contents(
            folder, stored, lambda report: None,
            lambda target: _lowered(request, step, target, knobs),
            chosen, request.tvm_runtime, report,
        )  # fmt: skip
        report("write", 0, 1)
        manifest = describe_graph(graph, recipe, stored, weights, variants, request.activations)
        artifact.write_manifest(folder, manifest)
    return manifest


def _lowered(request: Request, step: Any, target: targets.Target, knobs: Found) -> Any:
    """The step as kernels of a target."""
    from llmc.targets.graphs import lower_graph

    own = step_for(request, target, step)
    return lower_graph(own, target, knobs.of(target, own, plain=False))


def graph_step(request: Request) -> tuple[Imported, dict[str, str], list[StoredWeight], Any]:
    """The graph, the format of each matrix, what is stored, and the module of the step."""
    asked = [f"--{name.replace('_', '-')}" for name in _TEXT_ONLY if getattr(request, name) is not None]
    if asked:
        raise LlmcError(f"{', '.join(asked)}: not for a graph, which llmc compiles as it is; leave it out")
    graph = _imported(Path(request.source))
    recipe = formats_of(graph, request.quant)
    return graph, recipe, *_packed(graph, recipe, request.floats)


def _imported(path: Path) -> Imported:
    if path.suffix == ".pt2":
        from llmc.frontends.importers.exported import import_exported

        return import_exported(path)
    from llmc.frontends.importers.onnx_graph import import_onnx

    return import_onnx(path)


def formats_of(graph: Imported, quant: str) -> dict[str, str]:
    """Matrix -> format: float32 unless one is asked for, and bfloat16 for whole numbers, which it holds."""
    chosen = "f32" if quant == "auto" else quant
    return {name: "bf16" if name in graph.exact else chosen for name in graph.matrices}


def _packed(graph: Imported, recipe: dict[str, str], exact: bool) -> tuple[list[StoredWeight], Any]:
    """What is stored, in the order the step takes it, and the module of the step alone."""
    from tvm import relax

    from llmc.frontends.importers.imported import STEP
    from llmc.passes.pack_weights import pack_weights
    from llmc.passes.take_packed import take_packed

    inputs = len(graph.inputs)
    module = pack_weights(graph.module, recipe.__getitem__, exact)
    module, packed = take_packed(module, STEP, inputs + len(graph.weights))
    stored = [_as_it_is(name, values) for name, values in graph.weights.items()]
    stored += [_in_format(graph, matrix) for matrix in packed]
    module.update_func(module.get_global_var(STEP), module[STEP].with_attr("num_input", inputs))
    return stored, relax.transform.BundleModelParams()(module)


def _as_it_is(name: str, values: NDArray[Any]) -> StoredWeight:
    from llmc.compiler.evaluate import StoredWeight

    kind = str(values.dtype)
    return StoredWeight(name, values.shape, kind, kind, (name,), lambda _: np.ascontiguousarray(values), name)


def _in_format(graph: Imported, matrix: Packed) -> StoredWeight:
    from llmc.compiler.evaluate import StoredWeight

    shape = tuple(int(size) for size in matrix.variable.ty.shape)
    values, format = graph.matrices[matrix.name], FORMATS[matrix.format]
    return StoredWeight(
        matrix.name, shape, format.dtype, format.name, (matrix.name,), lambda _: format.pack(values), matrix.name
    )


def describe_graph(
    graph: Imported, recipe: dict[str, str], stored: Sequence[StoredWeight], weights: dict[str, Any],
    variants: list[dict[str, Any]], activations: str,
) -> dict[str, Any]:  # fmt: skip
    """The manifest, less what `write_manifest` adds; `activations`: what was asked for."""
    values = [*graph.weights.values(), *graph.matrices.values()]
    count = max(1, sum(value.size for value in values))
    return {
        "name": graph.name,
        "task": "graph",
        "source": graph.source,
        "operators": list(graph.operators),
        "inputs": [_port(port) for port in graph.inputs],
        "outputs": [_port(port) for port in graph.outputs],
        "conditions": [{"left": a, "relation": how, "right": b} for a, how, b in graph.conditions],
        "quantization": {
            "format": describe(recipe.values()) if recipe else "f32",
            "bits_per_weight": round(8 * sum(w.nbytes for w in stored) / count, 4),
            "formats": recipe,
            "activations": activations,
            "tensors": dict(Counter(w.format for w in stored)),
        },
        "variants": variants,
        "runtime": "lib/libtvm_runtime.so",
        "weights": weights,
        "compiler": {
            "llmc": importlib.metadata.version("llmc"), "tvm": importlib.metadata.version("apache-tvm"),
        },
    }  # fmt: skip


def _port(port: Any) -> dict[str, Any]:
    return {"name": port.name, "dtype": port.dtype, "shape": list(port.shape)}
