"""Matrices of experts, however a file has them, are one matrix: the rows of each expert after those before it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.errors import SourceError, SpecError
from llmc.compiler.formats import block_format, dequantize
from llmc.compiler.spec import Experts, ModelSpec, example, tensor_shapes
from llmc.compiler.spec.tensors import required_tensors
from llmc.frontends.binding import bind
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.gguf.blocks import kept_format
from llmc.frontends.tensor import READABLE, Tensor

Array = np.ndarray[Any, Any]
GATE, UP, DOWN = (f"layers.{{layer}}.experts.{name}" for name in ("gate", "up", "down"))
COUNT, F, C = 4, 16, 32


def spec_of(tensors: dict[str, str], **experts: Any) -> ModelSpec:
    """The example, its second layer with experts; tensors that are not said are called as ours."""
    spec = example()
    block = Experts(**{"count": COUNT, "used": 2, "ffn": F, "layers": (1,), **experts})
    object.__setattr__(spec, "experts", block)  # a ModelSpec would ask for its tensors at once
    return replace(spec, tensors={ours: tensors.get(ours, ours) for ours in required_tensors(spec)})


def write(path: Path, arrays: dict[str, Array]) -> dict[str, Tensor]:
    found, raw = {}, bytearray(b"head")
    for name, array in arrays.items():
        found[name] = (array.shape, len(raw), array.nbytes)
        raw += np.ascontiguousarray(array, "<f4").tobytes()
    path.write_bytes(raw)
    file = open_mapped(path, 1)
    return {name: Tensor(name, shape, "F32", at, size, file) for name, (shape, at, size) in found.items()}


def numbers(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def others(spec: ModelSpec) -> dict[str, Array]:
    """All tensors but the experts', by our names."""
    shapes = tensor_shapes(spec)
    return {name: numbers(shape, 0) for name, shape in shapes.items() if ".experts." not in name}


def test_only_the_layers_of_experts_have_them() -> None:
    names = set(tensor_shapes(spec_of({})))
    assert {"layers.0.gate", "layers.0.down", "layers.1.router", "layers.1.experts.down"} <= names
    assert not {"layers.1.gate", "layers.1.down", "layers.0.router", "layers.0.experts.down"} & names
    everywhere = set(required_tensors(spec_of({}, layers=(0, 1), shared_ffn=24, shared_gate=True, bias=True)))
    assert not {"layers.{layer}.gate", "layers.{layer}.up", "layers.{layer}.down"} & everywhere
    assert {f"layers.{{layer}}.{x}" for x in ("shared.gate", "shared.down", "shared_gate", "router_bias")} <= everywhere


WAYS: dict[str, tuple[dict[str, str], Any]] = {
    "a tensor for each": (
        {GATE: "l{layer}.e{expert}.g", UP: "l{layer}.e{expert}.u", DOWN: "l{layer}.e{expert}.d"},
        lambda g, u, d: {
            f"l1.e{e}.{x}": m[e] for e in range(COUNT) for x, m in (("g", g), ("u", u), ("d", d))
        },
    ),
    "each turned": (
        {GATE: "g{expert}l{layer} | transposed", UP: "u{layer}", DOWN: "d{expert}l{layer} | transposed"},
        lambda g, u, d: {f"{x}{e}l1": m[e].T for e in range(COUNT) for x, m in (("g", g), ("d", d))} | {"u1": u},
    ),
    "three dimensions": (
        {GATE: "g{layer}", UP: "u{layer}", DOWN: "d{layer}"},
        lambda g, u, d: {"g1": g, "u1": u, "d1": d},
    ),
    "three dimensions, turned": (
        {GATE: "g{layer} | transposed", UP: "u{layer}", DOWN: "d{layer} | transposed"},
        lambda g, u, d: {"g1": g.transpose(0, 2, 1), "u1": u, "d1": d.transpose(0, 2, 1)},
    ),
    "gate and up of each together": (
        {GATE: "gu{layer} | gate up by expert", UP: "gu{layer} | gate up by expert", DOWN: "d{layer}"},
        lambda g, u, d: {"gu1": np.concatenate([g, u], axis=1), "d1": d.reshape(COUNT * C, F)},
    ),
    "gate and up of each together, turned, a tensor for each": (
        {
            GATE: "gu{layer}.{expert} | transposed | gate up by expert",
            UP: "gu{layer}.{expert} | transposed | gate up by expert", DOWN: "d{layer}",
        },
        lambda g, u, d: {f"gu1.{e}": np.concatenate([g[e], u[e]]).T for e in range(COUNT)} | {"d1": d},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_experts_are_read_one_under_another(way: str, tmp_path: Path) -> None:
    named, stored = WAYS[way]
    spec = spec_of(named)
    ours = [numbers((COUNT, *shape), seed) for seed, shape in enumerate([(F, C), (F, C), (C, F)])]
    bound = bind(spec, write(tmp_path / "f", others(spec) | stored(*ours)), [], {}, "f")
    for name, array in zip(("gate", "up", "down"), ours, strict=True):
        expected = array.reshape(-1, array.shape[2])
        tensor = bound[f"layers.1.experts.{name}"]
        assert tensor.shape == expected.shape
        np.testing.assert_array_equal(tensor.read(), expected)
        for start, stop in ((0, 0), (3, 5), (F - 1, 2 * F + 1), (len(expected) - 1, len(expected))):
            np.testing.assert_array_equal(tensor.read_rows(start, stop), expected[start:stop])


@pytest.mark.parametrize("stacked", [True, False])
def test_quantized_experts_are_kept(stacked: bool, tmp_path: Path) -> None:
    rows, columns = COUNT * F, C
    values, size = READABLE["Q8_0"]
    nbytes = rows * columns // values * size
    raw = np.random.default_rng(0).integers(0, 128, nbytes, np.uint8).reshape(-1, size)
    raw[:, 1] = 0x2C  # no scale is an infinity
    (tmp_path / "q").write_bytes(raw.tobytes())
    file = open_mapped(tmp_path / "q", 1)
    part = nbytes // COUNT
    whole = {"g1": Tensor("g1", (COUNT, F, C), "Q8_0", 0, nbytes, file)}
    each = {f"g1.{e}": Tensor(f"g1.{e}", (F, C), "Q8_0", e * part, part, file) for e in range(COUNT)}
    spec = spec_of({GATE: "g{layer}" if stacked else "g{layer}.{expert}"})
    found = write(tmp_path / "f", others(spec) | {f"layers.1.experts.{x}": numbers((rows, C), 1) for x in ("up",)}
                  | {"layers.1.experts.down": numbers((COUNT * C, F), 2)})  # fmt: skip
    tensor = bind(spec, found | (whole if stacked else each), [], {}, "f")["layers.1.experts.gate"]
    assert tensor.kept == kept_format("Q8_0")
    format = block_format(tensor.kept)
    np.testing.assert_array_equal(dequantize(format, tensor.read_quantized())[:, :columns], tensor.read())


FAULTS: dict[str, tuple[Any, str]] = {
    "one is not there": (lambda t: t.pop("l1.e2.g"), "missing l1.e2.g"),
    "one too many": (lambda t: t.update({"l1.e4.g": numbers((F, C), 0)}), "not read by any block l1.e4.g"),
    "one of another shape": (lambda t: t.update({"l1.e2.g": numbers((F, 2 * C), 0)}), "the experts have shapes"),
    "all of another shape": (
        lambda t: t.update({f"l1.e{e}.g": numbers((F + 1, C), 0) for e in range(COUNT)}),
        "is [68, 32], wanted [64, 32]",
    ),
    "vectors": (lambda t: t.update({f"l1.e{e}.g": numbers((F,), 0) for e in range(COUNT)}), "wanted one of matrices"),
    "other experts": (lambda t: t.update({"u1": numbers((2, 2 * F, C), 0)}), "it has 2 matrices, wanted 4 experts"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_are_no_experts_is_refused(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    spec = spec_of({GATE: "l{layer}.e{expert}.g", UP: "u{layer}", DOWN: "d{layer}"})
    arrays = others(spec) | {f"l1.e{e}.g": numbers((F, C), e) for e in range(COUNT)}
    arrays |= {"u1": numbers((COUNT, F, C), 1), "d1": numbers((COUNT, C, F), 2)}
    bind(spec, write(tmp_path / "good", arrays), [], {}, "f")
    change(arrays)
    with pytest.raises(SourceError, match=re.escape(message)):
        bind(spec, write(tmp_path / "bad", arrays), [], {}, "f")


@pytest.mark.parametrize(
    ("ours", "value", "message"),
    [
        ("layers.{layer}.router", "r{layer}.{expert}", "wanted {expert} once, and only for"),
        (GATE, "{layer}.{expert}.{expert}", "wanted {expert} once"),
        (GATE, "{layer} | q k by expert", "by expert is for gate and up"),
        (GATE, "{layer} | gate up by experts", "wanted group, expert, row or a number after by"),
    ],
)
def test_values_that_name_no_experts(ours: str, value: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        spec_of({ours: value})
