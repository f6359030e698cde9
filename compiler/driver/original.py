"""The unquantized model, run once with a layer of it, or a piece of its vocabulary, in memory: what a check needs.

probe.py holds all of it, which calibration on long texts and the choice of formats read many times.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

import llmc.targets.target as targets
from llmc.compiler import pipeline
from llmc.compiler.driver.probe import (
    around_packing,
    array_of,
    as_tensor,
    index_arrays,
    squares_of_inputs,
    use_all_cpus,
)
from llmc.compiler.driver.reading import Reading, zeros
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.driver.vocabulary import Pieces
from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import PAGE
from llmc.compiler.spec import ModelSpec, cached_heads, layer_groups, pool_layers, tensor_shapes
from llmc.compiler.spec.parts import EMBED, HEAD, part_name, part_sizes
from llmc.frontends.graph.build import build
from llmc.passes import lift_weights
from llmc.passes.matrices import matrices
from llmc.passes.pipeline import stages
from llmc.passes.quantize.record_inputs import record_inputs
from llmc.runtime.engine.freed_memory import give_back
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

    `hidden`: outputs are vectors, which those of such a model are not. `pieces`: of its vocabulary, which may take more
    than all layers.
    """

    hidden = False

    def __init__(
        self, model: Any, progress: Callable[[int, int], None] | None = None, pieces: Pieces | None = None
    ) -> None:
        self._pieces = pieces or Pieces.of(model.spec)
        spec, target = self._pieces.spec(model.spec), targets.native()
        self._names = [EMBED, *map(part_name, range(spec.sizes.layers)), HEAD]
        whole = build(spec, "f32", spec.sizes.layers)
        module = tvm.IRModule({whole.get_global_var(name): whole[name] for name in self._names})
        early, late = around_packing(stages(lambda name: "f32"))
        module = pipeline.run(early, module)
        self._matrices = {name: _multiplied(module, name) for name in self._names}
        module = pipeline.run(late, record_inputs(module, self._names))
        self._stored = lift_weights.stored_by_all(module, list(tensor_shapes(spec)))
        bundled = lift_weights.bundle_weights(module)
        read = {name: _items_read(bundled[name]) for name in self._names}
        self._caches = {name: kv for name, (kv, _) in read.items()}  # K and V of layers
        self._reads = {name: weights for name, (_, weights) in read.items()}
        executable = compile_module(lower(bundled, target), target)
        machine = relax.VirtualMachine(executable, tvm.cpu(), "naive")  # pools keep memory of every length of text
        self._functions = {name: machine[name] for name in self._names}
        self._model, self._source, self._progress = model, ModelSources(model), progress
        heads, size = cached_heads(spec)
        self._page, self._layers = (2, heads, size * PAGE), pool_layers(spec)
        self._groups = len(layer_groups(spec))

    def run(
        self, texts: list[list[int]], judged: int, wanted: Container[str]
    ) -> tuple[list[F32], list[dict[str, F32]]]:
        """Logits (n, V) of every place of the last `judged` texts; and of each text, by weight, mean squares (K,) of
        what it is multiplied with, of those `wanted` at least.

        A part's weights are in memory while all texts pass through it, and those of the next are read.
        """
        use_all_cpus()
        readings = [self._begun(ids, len(texts) - place <= judged) for place, ids in enumerate(texts)]
        steps = self._steps(texts, judged, wanted)
        with ThreadPoolExecutor(1, "weights") as pool:
            ahead = pool.submit(self._weights, *steps[0])
            for number, (name, start) in enumerate(steps, 1):
                weights = ahead.result()
                if number < len(steps):
                    ahead = pool.submit(self._weights, *steps[number])
                for reading in readings:
                    self._pass(reading, name, start, weights)
                give_back()
                later = set[int]().union(*(self._caches[part] for part, _ in steps[number:]))
                for reading in readings:
                    reading.end(self._caches[name] - later)
                if self._progress:
                    self._progress(number, len(steps))
        return [reading.logits for reading in readings if reading.judged], [each.squares for each in readings]

    def _steps(self, texts: list[list[int]], judged: int, wanted: Container[str]) -> list[tuple[str, int]]:
        """Parts in order, those at the ends once for each piece of the vocabulary that counts; and its first entry."""
        starts, size = self._pieces.starts, self._pieces.size
        used = [start for start in starts if any(start <= token < start + size for ids in texts for token in ids)]
        multiplied = any(name in wanted for names in self._matrices[HEAD] for name in names)
        heads = starts if judged else starts[:1] if multiplied else []
        return [(EMBED, n) for n in used] + [(name, 0) for name in self._names[1:-1]] + [(HEAD, n) for n in heads]

    def _begun(self, ids: list[int], judged: bool) -> Reading:
        index, pages = index_arrays(ids, 0, self._groups)
        tensors = [tvm.runtime.tensor(array) for array in index]
        empty = [zeros(0, *self._page)] * self._layers
        return Reading(np.array(ids), tensors, pages, empty, judged, self._pieces)

    def _weights(self, name: str, start: int) -> list[Any]:
        """Those that a part reads, and nothing in the places of the others."""
        at_an_end = name in (EMBED, HEAD)
        source = ModelSources(self._pieces.model(self._model, start)) if at_an_end else self._source
        weights = [zeros(1)] * len(self._stored)
        for number in self._reads[name]:
            weights[number] = as_tensor(self._stored[number].compute(source))
        self._model.let_go()
        return weights

    def _pass(self, reading: Reading, name: str, start: int, weights: list[Any]) -> None:
        """A text passes through a part."""
        call, matrices = self._functions[name], self._matrices[name]
        if name == EMBED:
            inputs = reading.embed(start, lambda *inputs: call(*inputs, weights))
        else:
            reading.begin(self._caches[name])
            found = call(*reading.inputs(name), weights)
            inputs = list(map(array_of, list(found)[-len(matrices) :])) if matrices else []
            if name == HEAD:
                reading.take_logits(start, array_of(found[0]))
            else:
                reading.x = found[0] if matrices else found
        reading.squares |= squares_of_inputs(matrices, inputs)


def _multiplied(module: tvm.IRModule, function: str) -> list[tuple[str, ...]]:
    """The weights of each matrix whose input `record_inputs` gives."""
    return [matrix.sources for matrix in matrices(module, function) if matrix.input is not None]


def _items_read(function: Any) -> tuple[set[int], set[int]]:
    """Which items a function reads of its last two parameters, which are tuples: K and V of layers, and weights."""
    kv, weights = function.params[-2:]
    read: dict[Any, set[int]] = {kv: set(), weights: set()}

    def visit(expr: Any) -> None:
        if type(expr) is relax.TupleGetItem and expr.tuple_value in read:
            read[expr.tuple_value].add(int(expr.index))

    relax.analysis.post_order_visit(function.body, visit)
    return read[kv], read[weights]
