"""The unquantized model, compiled for this machine to be measured: logits, inputs of matrices, replaced matrices.

Of a model with an encoder only logits are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

import llmc.targets.target as targets
from llmc.compiler import pipeline
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.formats import FORMATS
from llmc.compiler.kv_pages import PAGE
from llmc.compiler.pipeline import Stage
from llmc.compiler.spec import cached_heads, layer_groups, pool_layers, tensor_shapes
from llmc.frontends.graph.build import build
from llmc.passes import lift_weights
from llmc.passes.matrices import Matrix, matrices
from llmc.passes.pipeline import stages
from llmc.passes.quantize.record_inputs import record_inputs
from llmc.runtime.loading.cpu import default_threads
from llmc.runtime.loading.library import set_most_threads, use_threads
from llmc.runtime.loading.weights import ALIGN
from llmc.targets.build import compile_module
from llmc.targets.lower import lower

F32 = NDArray[np.float32]


class Probe:
    """A float32 model in memory: four bytes a weight.

    `matrices` are its matrices, fused as the artifact's are when they share a format; none of a model with an encoder.
    """

    def __init__(self, model: Any, progress: Callable[[int, int], None] | None = None) -> None:
        spec = model.spec
        target = targets.native()
        early, late = around_packing(stages(lambda name: "f32"))
        module = pipeline.run(early, build(spec, "f32"))
        self.matrices: list[Matrix] = [] if spec.encoder else matrices(module)
        module = pipeline.run(late, module if spec.encoder else record_inputs(module))
        stored = lift_weights.stored_by_all(module, list(tensor_shapes(spec)))
        executable = compile_module(lower(lift_weights.bundle_weights(module), target), target)
        machine = relax.VirtualMachine(executable, tvm.cpu())
        self._step, self._encode = machine["step"], machine["encode"] if spec.encoder else None
        self._place = {weight.sources: i for i, weight in enumerate(stored)}
        self._weights = []
        source = ModelSources(model)
        for number, weight in enumerate(stored):
            self._weights.append(as_tensor(weight.compute(source)))
            if progress:
                progress(number + 1, len(stored))
        heads, size = cached_heads(spec)
        self._page = (2, heads, size * PAGE)
        self._layers, self._groups = pool_layers(spec), len(layer_groups(spec))
        self.hidden: bool = spec.head.kind == "hidden"  # outputs are vectors, not logits

    def run(self, ids: list[int], source: list[int] | None = None) -> tuple[F32, list[F32]]:
        """Logits (n, V) of every place of a text, and the inputs (n, K) of every matrix that has one.

        `source`: in a model with an encoder, the ids that the text is an answer to.
        """
        use_all_cpus()
        index, pages = index_arrays(ids, 0, self._groups)
        sources, more = index_arrays(source or [], pages, 1)
        kv = [tvm.runtime.tensor(np.zeros((pages + more, *self._page), np.float32)) for _ in range(self._layers)]
        if self._encode is not None and source is not None:
            self._encode(*map(tvm.runtime.tensor, sources), kv, self._weights)
            index += [np.array([len(source)], np.int32), *sources[5:7]]
        logits, *rest = self._step(*map(tvm.runtime.tensor, index), kv, self._weights)
        inputs = rest[1 if self.hidden else 3 :]  # after argmax, or the three of `top`
        return logits.numpy(), [x.numpy() for x in inputs]

    @contextmanager
    def replaced(self, matrix: Matrix, weight: F32) -> Iterator[None]:
        """Run with other numbers (N, K) in one matrix."""
        place = self._place[matrix.sources]
        original = self._weights[place]
        self._weights[place] = tvm.runtime.tensor(FORMATS["f32"].pack(weight))
        try:
            yield
        finally:
            self._weights[place] = original


def as_tensor(array: NDArray[Any]) -> Any:
    """An array for kernels: itself where they can read it, else a copy."""
    ready = array.ctypes.data % ALIGN == 0 and array.flags.c_contiguous and array.flags.writeable
    return tvm.runtime.from_dlpack(array) if ready else tvm.runtime.tensor(array)


def array_of(tensor: Any) -> F32:
    """What a kernel gave, not copied."""
    found: Any = np.from_dlpack(tensor)
    return cast(F32, found)


def squares_of_inputs(matrices: Iterable[tuple[str, ...]], inputs: Iterable[F32]) -> dict[str, F32]:
    """Weight -> mean squares (K,) of what it is multiplied with, of matrices' weights and inputs (n, K)."""
    pairs = zip(matrices, inputs, strict=True)
    return {name: square for names, x in pairs for square in [np.square(x).mean(0)] for name in names}


def use_all_cpus() -> None:
    """Kernels called from this thread run on as many as the process may use; TVM would take half of them."""
    threads = default_threads()
    set_most_threads(threads)
    use_threads(threads)


def index_arrays(ids: list[int], first_page: int, groups: int) -> tuple[list[NDArray[np.int32]], int]:
    """The index arrays of a text alone, in pages from `first_page` on, and how many pages it takes."""
    count = len(ids)
    pages = -(-count // PAGE)
    places = np.arange(count, dtype=np.int32)
    own = np.arange(first_page, first_page + pages, dtype=np.int32)
    ends = np.array([0, pages], np.int32)
    rows = [np.array(ids, np.int32), places, np.zeros(count, np.int32), places]
    return [*rows, np.zeros((1, 2), np.int32), ends, *[own] * groups, places], pages


def around_packing(whole: list[Stage]) -> tuple[list[Stage], list[Stage]]:
    """The stages before matrices are packed, and the rest."""
    first = next(i for i, stage in enumerate(whole) if stage.name == "pack_weights")
    return whole[:first], whole[first:]
