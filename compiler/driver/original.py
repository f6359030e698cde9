"""The unquantized model, run once with one layer of it in memory: what a check needs, however large the model is.

probe.py holds all of it, which calibration on long texts and the choice of formats read many times.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

import llmc.targets.target as targets
from llmc.compiler import pipeline
from llmc.compiler.driver.probe import around_packing, index_arrays, squares_of_inputs, use_all_cpus
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import PAGE
from llmc.compiler.spec import ModelSpec, cached_heads, layer_groups, pool_layers, tensor_shapes
from llmc.compiler.spec.parts import EMBED, HEAD, part_name, part_sizes
from llmc.frontends.graph.build import build
from llmc.passes import lift_weights
from llmc.passes.matrices import matrices
from llmc.passes.pipeline import stages
from llmc.passes.quantize.record_inputs import record_inputs
from llmc.targets.build import compile_module
from llmc.targets.lower import lower

F32 = NDArray[np.float32]


def runs_in_parts(spec: ModelSpec) -> bool:
    """Whether the model can be cut into its layers."""
    try:
        return bool(part_sizes(spec, spec.sizes.layers))
    except LlmcError:
        return False


class Original:
    """A float32 model whose weights are read again for every text.

    `hidden`: outputs are vectors, which those of such a model are not.
    """

    hidden = False

    def __init__(self, model: Any, progress: Callable[[int, int], None] | None = None) -> None:
        spec, target = model.spec, targets.native()
        self._names = [EMBED, *map(part_name, range(spec.sizes.layers)), HEAD]
        whole = build(spec, "f32", spec.sizes.layers)
        module = tvm.IRModule({whole.get_global_var(name): whole[name] for name in self._names})
        early, late = around_packing(stages(lambda name: "f32"))
        module = pipeline.run(early, module)
        self._matrices = {name: _multiplied(module, name) for name in self._names}
        module = pipeline.run(late, record_inputs(module, self._names))
        self._stored = lift_weights.stored_by_all(module, list(tensor_shapes(spec)))
        bundled = lift_weights.bundle_weights(module)
        self._reads = {name: _weights_read(bundled[name]) for name in self._names}
        machine = relax.VirtualMachine(compile_module(lower(bundled, target), target), tvm.cpu())
        self._functions = {name: machine[name] for name in self._names}
        self._source, self._progress = ModelSources(model), progress
        heads, size = cached_heads(spec)
        self._page, self._layers = (2, heads, size * PAGE), pool_layers(spec)
        self._groups = len(layer_groups(spec))

    def run(self, texts: list[list[int]]) -> list[tuple[F32, dict[str, F32]]]:
        """Of each text, logits (n, V) of every place; and, by weight, mean squares (K,) of what it is multiplied with.

        A part's weights are in memory while all texts pass through it, and those of the next are read.
        """
        use_all_cpus()
        readings = [self._begun(ids) for ids in texts]
        with ThreadPoolExecutor(1, "weights") as pool:
            ahead = pool.submit(self._weights, self._names[0])
            for number, name in enumerate(self._names, 1):
                weights = ahead.result()
                if number < len(self._names):
                    ahead = pool.submit(self._weights, self._names[number])
                for reading in readings:
                    found = self._functions[name](*reading.inputs(name), weights)
                    reading.take(found, self._matrices[name], number == len(self._names))
                if self._progress:
                    self._progress(number, len(self._names))
        return [(reading.x.numpy(), reading.squares) for reading in readings]

    def _begun(self, ids: list[int]) -> _Reading:
        index, pages = index_arrays(ids, 0, self._groups)
        kv = [tvm.runtime.tensor(np.zeros((pages, *self._page), np.float32)) for _ in range(self._layers)]
        return _Reading([tvm.runtime.tensor(array) for array in index], kv)

    def _weights(self, name: str) -> list[Any]:
        """Those that a part reads, and nothing in the places of the others."""
        weights = [tvm.runtime.tensor(np.zeros(1, np.float32))] * len(self._stored)
        for number in self._reads[name]:
            weights[number] = tvm.runtime.tensor(self._stored[number].compute(self._source))
        return weights


@dataclass
class _Reading:
    """A text on its way: index arrays and pages, what its rows have come to, and what matrices were given."""

    index: list[Any]
    kv: list[Any]
    x: Any = None
    squares: dict[str, F32] = field(default_factory=dict)

    def inputs(self, part: str) -> list[Any]:
        """What a part takes beside weights."""
        tokens, positions, *places, wanted = self.index
        if part == EMBED:
            return [tokens, positions]
        return [self.x, wanted] if part == HEAD else [self.x, positions, *places, self.kv]

    def take(self, found: Any, matrices: list[tuple[str, ...]], last: bool) -> None:
        """What a part gives: rows, or the last one's logits and their greatest, and then its matrices' inputs."""
        self.x = found[0] if last or matrices else found
        if matrices:
            self.squares |= squares_of_inputs(matrices, [x.numpy() for x in list(found)[-len(matrices) :]])


def _multiplied(module: tvm.IRModule, function: str) -> list[tuple[str, ...]]:
    """The weights of each matrix whose input `record_inputs` gives."""
    return [matrix.sources for matrix in matrices(module, function) if matrix.input is not None]


def _weights_read(function: Any) -> set[int]:
    """Places of the stored weights that a function reads, in its last parameter."""
    read: set[int] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.TupleGetItem) and expr.tuple_value.same_as(function.params[-1]):
            read.add(int(expr.index))

    relax.analysis.post_order_visit(function.body, visit)
    return read
