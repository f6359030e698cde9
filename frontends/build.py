"""ModelSpec -> Relax: the step function a model is, written block by block, with no name of a model in sight.

The result is the unlowered graph: plain float32 weights, one op a line of the paper. It runs as it is (slowly) by the
ops' NumPy meanings, and is the twin that every pass and kernel is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from llmc.compiler import kv_pages, ops
from llmc.compiler.spec import ModelSpec, tensor_shapes

STEP = "step"


@dataclass(frozen=True)
class _Inputs:
    """Symbolic inputs of a step; M rows, S sequences, P pages listed, R rows that want logits."""

    tokens: Any  # (M,) int32
    positions: Any  # (M,) int32, for RoPE
    seqs: Any  # (M,) int32, row -> sequence of this step
    slots: Any  # (M,) int32, row -> place in its sequence's KV
    page_indptr: Any  # (S + 1,) int32
    page_ids: Any  # (P,) int32
    logit_rows: Any  # (R,) int32
    kv: Any  # tuple of one (pages, *page_shape) a layer, see kv_pages.py

    def all(self) -> list[Any]:
        """In the order of the compiled function."""
        return [
            self.tokens, self.positions, self.seqs, self.slots,
            self.page_indptr, self.page_ids, self.logit_rows, self.kv,
        ]  # fmt: skip


def build(spec: ModelSpec, kv_dtype: str = "f32") -> tvm.IRModule:
    """The module with one function `step(inputs..., kv, weights...) -> (logits (R, V), argmax (R,))`.

    Weights are parameters after the inputs (`num_input`), in the order of `tensor_shapes(spec)`, under our names.
    """
    inputs = _inputs(spec, kv_dtype)
    weights = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in tensor_shapes(spec).items()}
    builder = relax.BlockBuilder()
    params = [*inputs.all(), *weights.values()]
    with builder.function(STEP, params, attrs={"num_input": len(inputs.all())}):
        with builder.dataflow():
            result = _model(builder, spec, inputs, weights, kv_dtype)
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.get()


def _inputs(spec: ModelSpec, kv_dtype: str) -> _Inputs:
    sizes = {name: tirx.Var(name, "int64") for name in ("rows", "indptr", "pages", "wanted", "pool")}

    def index(name: str, size: str) -> Any:
        return relax.Var(name, relax.TensorType((sizes[size],), "int32"))

    page = kv_pages.page_shape(kv_dtype, spec.attention.kv_heads, spec.attention.head_dim)
    layer = relax.TensorType((sizes["pool"], *page), str(kv_pages.KINDS[kv_dtype].dtype))
    return _Inputs(
        index("tokens", "rows"), index("positions", "rows"), index("seqs", "rows"), index("slots", "rows"),
        index("page_indptr", "indptr"), index("page_ids", "pages"), index("logit_rows", "wanted"),
        relax.Var("kv", relax.TupleType([layer] * spec.sizes.layers)),
    )  # fmt: skip


def _model(builder: Any, spec: ModelSpec, inputs: _Inputs, weights: dict[str, Any], kv_dtype: str) -> Any:
    x = ops.emit(builder, "embedding", inputs.tokens, weights["embedding"])
    if spec.embedding.scale != 1:
        x = ops.emit(builder, "scale", x, factor=spec.embedding.scale)
    sights = [_sight(spec, layer) for layer in range(spec.sizes.layers)]
    tables = {
        rope: ops.emit(builder, "rope_table", inputs.positions, relax.const(rope_frequencies(spec, *rope)))
        for rope in dict.fromkeys(sight.rope for sight in sights)
    }
    for layer, sight in enumerate(sights):
        own = _Layer(builder, spec, weights, f"layers.{layer}.", sight)
        kv = builder.emit(relax.TupleGetItem(inputs.kv, layer))
        mixed = own.attention(own.norm(x, "attention_norm"), tables[sight.rope], kv, inputs, kv_dtype)
        x = builder.emit(relax.op.add(x, own.post_norm(mixed, "attention_post_norm")))
        mixed = own.mlp(own.norm(x, "mlp_norm"))
        x = builder.emit(relax.op.add(x, own.post_norm(mixed, "mlp_post_norm")))
    x = ops.emit(builder, "take_rows", x, inputs.logit_rows)
    x = ops.emit(builder, "rms_norm", x, weights["final_norm"], eps=spec.norm.eps)
    logits = ops.emit(builder, "linear", x, weights["embedding" if spec.head.tied else "head"])
    return relax.Tuple([logits, ops.emit(builder, "argmax", logits)])


@dataclass(frozen=True)
class _Sight:
    """What a layer's rows see: the last `window` tokens (0: all), placed by rope of this base and factor."""

    window: int
    rope: tuple[float, float]


def _sight(spec: ModelSpec, layer: int) -> _Sight:
    window = spec.window
    if window and layer in window.layers:
        return _Sight(window.size, (window.theta, window.factor))
    return _Sight(0, (spec.position.theta, spec.position.factor))


@dataclass(frozen=True)
class _Layer:
    """The blocks of one layer over its weights."""

    builder: Any
    spec: ModelSpec
    weights: dict[str, Any]
    prefix: str
    sight: _Sight

    def norm(self, x: Any, name: str) -> Any:
        """(M, C) -> (M, C)."""
        return ops.emit(self.builder, "rms_norm", x, self.weights[self.prefix + name], eps=self.spec.norm.eps)

    def post_norm(self, x: Any, name: str) -> Any:
        """The norm of what a block gives, where norms stand on both its sides: (M, C) -> (M, C)."""
        return self.norm(x, name) if self.spec.norm.place == "sandwich" else x

    def linear(self, x: Any, name: str) -> Any:
        """(M, K) -> (M, N), with the layer's bias when the spec has one."""
        y = ops.emit(self.builder, "linear", x, self.weights[self.prefix + name])
        bias = self.weights.get(f"{self.prefix}{name}_bias")
        return y if bias is None else self.builder.emit(relax.op.add(y, bias))

    def concat(self, parts: list[Any]) -> Any:
        """Columns side by side."""
        return self.builder.emit(relax.op.concat(parts, axis=1))

    def attention(self, x: Any, table: Any, kv: Any, inputs: _Inputs, kv_dtype: str) -> Any:
        """Grouped-query attention over the paged cache: (M, C) -> (M, C)."""
        block = self.spec.attention
        qkv = self.concat([self.linear(x, name) for name in ("q", "k", "v")])
        if block.qk_norm == "head":
            weights = [self.weights[f"{self.prefix}{name}_norm"] for name in "qk"]
            qkv = ops.emit(
                self.builder, "qk_norm", qkv, *weights,
                heads=block.heads, kv_heads=block.kv_heads, head_dim=block.head_dim, eps=self.spec.norm.eps,
            )  # fmt: skip
        rotated = ops.emit(
            self.builder, "rope", qkv, table,
            rotated_heads=block.heads + block.kv_heads, head_dim=block.head_dim, layout=self.spec.position.layout,
        )  # fmt: skip
        mixed = ops.emit(
            self.builder, "attention", rotated, kv, inputs.seqs, inputs.slots, inputs.page_indptr, inputs.page_ids,
            heads=block.heads, kv_heads=block.kv_heads, head_dim=block.head_dim, scale=block.scale,
            window=self.sight.window, kv_dtype=kv_dtype,
        )  # fmt: skip
        return self.linear(mixed, "o")

    def mlp(self, x: Any) -> Any:
        """Gated MLP: (M, C) -> (M, C)."""
        gate_up = self.concat([self.linear(x, "gate"), self.linear(x, "up")])
        return self.linear(ops.emit(self.builder, "gated", gate_up, activation=self.spec.mlp.activation), "down")


def rope_frequencies(spec: ModelSpec, theta: float, factor: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """theta^(-2i / D) / factor for i < D / 2, float32 (https://arxiv.org/abs/2104.09864 section 3.2.2)."""
    size = spec.attention.head_dim
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    return (frequencies / np.float32(factor)).astype(np.float32)
