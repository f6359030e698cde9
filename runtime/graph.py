"""A compiled graph: arrays by name in, arrays by name out.

>>> graph = load_graph("model.llmc")  # doctest: +SKIP
>>> graph(x=array)["y"]  # doctest: +SKIP
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.loading import library
from llmc.runtime.loading.artifact import open_package
from llmc.runtime.loading.cpu import default_threads
from llmc.runtime.loading.crowding import Crowding
from llmc.runtime.loading.graph_manifest import GraphManifest, Port, Term, read_graph_manifest, value_of, words_of
from llmc.runtime.loading.integrity import Progress
from llmc.runtime.loading.weights import ALIGN, aligned_empty, map_weights

Array = NDArray[Any]

_MAX_VALUES = 1 << 40  # of an array: sizes are 64 bits wide, and no machine has more


def load_graph(
    path: str | os.PathLike[str], threads: int | None = None, verify: str = "auto", progress: Progress | None = None
) -> Graph:
    """Load the artifact of a graph, after checking it, as `load` does. Raises ArtifactError or RequestError."""
    if verify not in ("auto", "always"):
        raise RequestError(f"verify: got {verify!r}, wanted auto or always")
    if threads is not None and threads < 1:
        raise RequestError(f"threads: got {threads}, wanted 1 or more")
    most = default_threads()
    artifact = open_package(path, read_graph_manifest, verify == "always", progress)
    weights = map_weights(artifact.path(artifact.manifest.weights), artifact.manifest.order)
    library.set_most_threads(most)
    (step,) = library.load_functions(artifact, ["step"])
    ffi = library.import_ffi()
    stored = ffi.Array([ffi.from_dlpack(a, require_alignment=ALIGN, require_contiguous=True) for a in weights.arrays])
    return Graph(artifact.manifest, step, stored, weights.worked, min(most, threads or most))


class Graph:
    """A graph ready to run. Calls from several threads are safe and take turns."""

    def __init__(
        self, manifest: GraphManifest, step: Any, stored: Any, worked: Callable[[float], None], threads: int
    ) -> None:
        self.manifest = manifest
        self.inputs, self.outputs = manifest.inputs, manifest.outputs
        self._step, self._weights, self._worked, self._crowding = step, stored, worked, Crowding(threads)
        self._turn = threading.Lock()

    def __call__(self, /, **arrays: Any) -> dict[str, Array]:
        """The outputs by name. Raises RequestError naming every array that does not fit."""
        return self.run(arrays)

    def run(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """The same, for names that Python's syntax does not take."""
        given = {name: np.asarray(value) for name, value in arrays.items()}
        sizes = check_arrays(self.manifest, given)
        ffi = library.import_ffi()
        placed = [ffi.from_dlpack(_placed(given[port.name], port.dtype)) for port in self.inputs]
        with self._turn:
            library.use_threads(self._crowding.begin())
            start = time.perf_counter()
            try:
                results = self._step(*placed, self._weights)
            except RuntimeError as error:
                reason = (str(error).strip().splitlines() or ["no reason"])[-1]
                raise LlmcError(f"the graph failed on these arrays: {reason[:300]}") from error
            seconds = time.perf_counter() - start
            self._crowding.end()
            self._worked(seconds)
        values = [np.array(np.from_dlpack(result)) for result in results]
        for port, value in zip(self.outputs, values, strict=True):
            wanted = tuple(value_of(size, sizes) for size in port.shape)
            if value.shape != wanted:
                raise LlmcError(f"output {port.name!r} has shape {value.shape}, and the manifest says {wanted}")
        return {port.name: value for port, value in zip(self.outputs, values, strict=True)}


def check_arrays(manifest: GraphManifest, given: Mapping[str, Array]) -> dict[str, int]:
    """The sizes that the arrays give the names in the inputs' shapes. Raises RequestError for all that does not fit."""
    wanted = {port.name: port for port in manifest.inputs}
    problems = [f"no input {name!r}" for name in wanted if name not in given]
    problems += [f"unknown input {name!r}" for name in given if name not in wanted]
    sizes: dict[str, int] = {}
    for name, port in wanted.items():
        if name in given:
            problems += _misfit(port, given[name], sizes)
    if not problems:
        problems = [*_broken(manifest, sizes)]
    if problems:
        inputs = ", ".join(f"{port.name} {port.dtype} {shape_words(port.shape)}" for port in manifest.inputs)
        raise RequestError(f"{'; '.join(problems[:20])}. The graph takes: {inputs}")
    return sizes


def _misfit(port: Port, array: Array, sizes: dict[str, int]) -> list[str]:
    """What is wrong with an array; the names of its sizes that are not known yet are learnt from it."""
    if not np.can_cast(array.dtype, port.dtype, "safe"):
        return [f"{port.name!r} is {array.dtype}, wanted {port.dtype}"]
    fits = array.ndim == len(port.shape) and all(array.shape) and math.prod(array.shape) < _MAX_VALUES
    if fits:
        for size, wanted in zip(array.shape, port.shape, strict=True):
            fits = fits and size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
    if fits:
        return []
    known = {name: size for name, size in sizes.items() if name in port.shape}
    where = f" where {', '.join(f'{name} is {size}' for name, size in known.items())}" if known else ""
    return [f"{port.name!r} has shape {shape_words(array.shape)}, wanted {shape_words(port.shape)}{where}"]


def _broken(manifest: GraphManifest, sizes: dict[str, int]) -> list[str]:
    """The conditions that these sizes do not meet."""
    problems = []
    for condition in manifest.conditions:
        try:
            left, right = value_of(condition.left, sizes), value_of(condition.right, sizes)
            met = left == right if condition.relation == "equal" else left >= right
        except ZeroDivisionError:
            met = False
        if not met:
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            problems.append(
                f"sizes {given}: {words_of(condition.left)} has to be {_RELATIONS[condition.relation]}"
                f"{words_of(condition.right)}"
            )
    return problems


_RELATIONS = {"equal": "", "at least": "at least "}


def shape_words(shape: tuple[Term, ...]) -> str:
    """A shape in brackets.

    >>> shape_words(("batch", 3))
    '[batch, 3]'
    """
    return f"[{', '.join(map(words_of, shape))}]"


def _placed(array: Array, dtype: str) -> Array:
    """A copy in order, where kernels can read it."""
    place = aligned_empty(array.shape, dtype)
    np.copyto(place, array)
    return place
