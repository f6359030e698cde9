"""The unquantized model, run once with one layer of it in memory: what a check needs, however large the model is.

probe.py holds all of it, which calibration and the choice of formats read many times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

import llmc.targets.target as targets
from llmc.compiler import pipeline
from llmc.compiler.driver.probe import index_arrays
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import PAGE
from llmc.compiler.spec import ModelSpec, cached_heads, layer_groups, pool_layers, tensor_shapes
from llmc.compiler.spec.parts import EMBED, HEAD, part_name, part_sizes
from llmc.frontends.graph.build import build
from llmc.passes import lift_weights
from llmc.passes.pipeline import stages
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
        module = pipeline.run(stages(lambda name: "f32"), module)
        self._stored = lift_weights.stored_by_all(module, list(tensor_shapes(spec)))
        bundled = lift_weights.bundle_weights(module)
        self._reads = {name: _weights_read(bundled[name]) for name in self._names}
        machine = relax.VirtualMachine(compile_module(lower(bundled, target), target), tvm.cpu())
        self._functions = {name: machine[name] for name in self._names}
        self._source, self._progress = ModelSources(model), progress
        heads, size = cached_heads(spec)
        self._page, self._layers = (2, heads, size * PAGE), pool_layers(spec)
        self._groups = len(layer_groups(spec))

    def run(self, ids: list[int]) -> tuple[F32, list[F32]]:
        """Logits (n, V) of every place of a text, and nothing else, as `Probe.run`."""
        index, pages = index_arrays(ids, 0, self._groups)
        tokens, positions, *places, wanted = map(tvm.runtime.tensor, index)
        kv = [tvm.runtime.tensor(np.zeros((pages, *self._page), np.float32)) for _ in range(self._layers)]
        x = self._call(EMBED, tokens, positions)
        for name in self._names[1:-1]:
            x = self._call(name, x, positions, *places, kv)
        logits, *_ = self._call(HEAD, x, wanted)
        return logits.numpy(), []

    def _call(self, name: str, *inputs: Any) -> Any:
        """One part, with the weights that it reads and with nothing in the places of the others."""
        nothing = tvm.runtime.tensor(np.zeros(1, np.float32))
        weights = [nothing] * len(self._stored)
        for number in self._reads[name]:
            weights[number] = tvm.runtime.tensor(self._stored[number].compute(self._source))
        found = self._functions[name](*inputs, weights)
        if self._progress:
            self._progress(self._names.index(name) + 1, len(self._names))
        return found


def _weights_read(function: Any) -> set[int]:
    """Places of the stored weights that a function reads, in its last parameter."""
    read: set[int] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.TupleGetItem) and expr.tuple_value.same_as(function.params[-1]):
            read.add(int(expr.index))

    relax.analysis.post_order_visit(function.body, visit)
    return read
