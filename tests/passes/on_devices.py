"""Models of random weights, whole and on devices, run by what their ops mean: what tests of the partition compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from llmc.compiler import kv_pages, ops, pipeline
from llmc.compiler.formats import FORMATS
from llmc.compiler.placement import parse_placement
from llmc.compiler.spec import ModelSpec, cached_heads, example, layer_groups, pool_layers, tensor_shapes
from llmc.compiler.spec.blocks import Attention
from llmc.compiler.spec.tensors import required_tensors
from llmc.compiler.together import together
from llmc.frontends.graph.build import build
from llmc.passes.lift_weights import bundle_weights, stored_by_all
from llmc.passes.partition import partition
from llmc.passes.pipeline import stages
from llmc.targets.build import compile_module
from llmc.targets.lower import lower
from llmc.targets.target import native

PAGES = 8  # of the cache; a text has two of them, then its source two


def spec_of(heads: int = 4, kv_heads: int = 2, attention: dict[str, Any] | None = None, **blocks: Any) -> ModelSpec:
    """The example with so many heads of 8 numbers and other blocks."""
    fields = [name for name in example().__dataclass_fields__ if name not in ("name", "tensors")]
    plain = {name: getattr(example(), name) for name in fields}
    told = {"kind": "gqa", "head_dim": 8, "scale": 1 / math.sqrt(8), **(attention or {})}
    parts = {**plain, "attention": Attention(heads=heads, kv_heads=kv_heads, **told), **blocks}
    names = required_tensors(SimpleNamespace(**parts))
    return ModelSpec(name="devices", tensors={name: name for name in names}, **parts)


def weights_of(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random ones, norms about 1."""
    rng = np.random.default_rng(seed)
    shapes = tensor_shapes(spec)
    return {
        name: (("norm" in name and "bias" not in name) + 0.3 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


@dataclass
class _Device:
    """A compiled module with its weights and pages."""

    machine: Any
    weights: list[Any]
    pages: list[Any]
    outputs: dict[str, tuple[int, ...]]

    def run(self, name: str, inputs: list[np.ndarray]) -> dict[int, np.ndarray]:
        """What a function gives of the whole's outputs, by their numbers."""
        given = self.machine[name](*map(tvm.runtime.tensor, inputs), self.pages, *self.weights)
        given = [given] if isinstance(given, tvm.runtime.Tensor) else list(given)
        return {place: value.numpy() for place, value in zip(self.outputs[name], given, strict=False)}


def _pages(spec: ModelSpec, layers: int, kv_heads: tuple[int, ...]) -> list[Any]:
    _, size = cached_heads(spec)
    shapes = [kv_pages.page_shape("f32", kv_heads[layer], size) for layer in range(layers)]
    return [tvm.runtime.tensor(np.zeros((PAGES, *shape), np.float32)) for shape in shapes]


def _machine(module: tvm.IRModule) -> Any:
    return relax.VirtualMachine(relax.build(module, tvm.target.Target("llvm")), tvm.cpu())


class Arrays:
    """Where weights come from when they are stored."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = weights

    def read(self, name: str) -> np.ndarray:
        return self.weights[name]

    def pack(self, format: str, names: tuple[str, ...]) -> np.ndarray:
        return FORMATS[format].pack(np.concatenate([self.weights[name] for name in names]))


def _compiled(module: tvm.IRModule, weights: dict[str, np.ndarray], format: str) -> tuple[Any, list[Any]]:
    """A machine of this computer's kernels, and its weights: one bundle."""
    module = pipeline.run(stages(lambda name: format), module)
    stored = [tvm.runtime.tensor(each.compute(Arrays(weights))) for each in stored_by_all(module, list(weights))]
    executable = compile_module(lower(bundle_weights(module), native()), native())
    return relax.VirtualMachine(executable, tvm.cpu()), [stored]


class Devices:
    """A model on the devices of a string, none for the whole; with `format` as kernels with weights of that format."""

    def __init__(
        self, spec: ModelSpec, weights: dict[str, np.ndarray], devices: str | None = None, split: str | None = None,
        format: str = "",
    ) -> None:  # fmt: skip
        ops.register_meanings()
        self.spec = spec
        module, self.groups = build(spec), [range(1)]
        if devices is None:
            layers = tuple(range(pool_layers(spec)))
            heads, every = (
                (cached_heads(spec)[0],) * len(layers),
                dict.fromkeys(("step", "encode", "turn"), tuple(range(99))),
            )
            self.devices = [self._device(module, weights, _pages(spec, len(layers), heads), every, format)]
            return
        placement = parse_placement(devices, split)
        self.groups = [placement.ranks(stage) for stage in range(len(placement.stages))]
        self.devices = []
        for part in partition(module, placement):
            own = {share.name: share.of(weights[share.name]) for share in part.weights}
            pages = _pages(spec, len(part.layers), part.kv_heads)
            self.devices.append(self._device(part.module, own, pages, part.outputs, format))

    def _device(
        self, module: tvm.IRModule, weights: dict[str, np.ndarray], pages: list[Any],
        outputs: dict[str, tuple[int, ...]], format: str,
    ) -> _Device:  # fmt: skip
        if format:
            return _Device(*_compiled(module, weights, format), pages, outputs)
        return _Device(_machine(module), [tvm.runtime.tensor(each) for each in weights.values()], pages, outputs)

    def run(self, name: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """What the function gives; devices that give the same number of its outputs must give the same bits."""
        found: dict[int, np.ndarray] = {}
        for given in together(self.groups, [partial(device.run, name, inputs) for device in self.devices]):
            for place, value in given.items():
                np.testing.assert_array_equal(found.setdefault(place, value), value)
        return [found[place] for place in sorted(found)]

    def encode(self, source: list[int]) -> None:
        """Reads a source into the last two pages."""
        self.run("encode", [*self._rows(source, 0, (PAGES - 2, PAGES - 1)), np.array([len(source) - 1], np.int32)])

    def step(self, tokens: list[int], before: int, source: list[int] | None = None) -> np.ndarray:
        """Logits (V,) after the tokens, of a text that has so many already."""
        inputs = [*self._rows(tokens, before, (1, 0)), np.array([len(tokens) - 1], np.int32)]
        if source is not None:
            told = ([len(source)], [0, 2], [PAGES - 2, PAGES - 1])
            inputs += [np.array(each, np.int32) for each in told]
        logits: np.ndarray = self.run("step", inputs)[0][0]
        return logits

    def turn(self, by: int) -> None:
        """Moves the text's keys by so many positions, where they lie."""
        ids = np.array([1, 0], np.int32)
        self.run("turn", [np.full(32, by, np.int32), ids, ids])

    def _rows(self, tokens: list[int], before: int, pages: tuple[int, int]) -> list[np.ndarray]:
        places = np.arange(before, before + len(tokens), dtype=np.int32)
        ids = [np.array(pages, np.int32)] * len(layer_groups(self.spec))
        return [
            np.array(tokens, np.int32), places, np.zeros(len(tokens), np.int32), places,
            np.zeros((1, 2), np.int32), np.array([0, 2], np.int32), *ids,
        ]  # fmt: skip


def answer(model: Devices, prompt: list[int], count: int, source: list[int] | None = None) -> np.ndarray:
    """Logits (count, V) while a model goes on with the prompt, taking the likeliest token each time."""
    if source is not None:
        model.encode(source)
    logits, fed, tokens = [], 0, prompt
    for _ in range(count):
        logits.append(model.step(tokens, fed, source))
        fed += len(tokens)
        tokens = [int(logits[-1].argmax())]
    return np.array(logits)
