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
from llmc.frontends.graph.experts import experts_mlp
from llmc.frontends.graph.rope import rope_of

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
    outer = Blocks(builder, spec, weights, "")
    x = _embed(outer, inputs)
    ropes = [rope_of(spec, layer) for layer in range(spec.sizes.layers)]
    size = spec.position.rotary_dim or spec.attention.head_dim
    tables = {
        rope: ops.emit(
            builder, "rope_table", inputs.positions, relax.const(rope.frequencies(size, spec.sizes.context)),
            magnitude=rope.magnitude,
        )
        for rope in dict.fromkeys(ropes)
        if rope is not None
    }  # fmt: skip
    for number, rope in enumerate(ropes):
        kv = builder.emit(relax.TupleGetItem(inputs.kv, number))
        sight = _Sight(number, None if rope is None else tables[rope], kv, inputs, kv_dtype)
        x = _layer(Blocks(builder, spec, weights, f"layers.{number}."), x, sight)
    return _head(outer, x, inputs)


def _embed(blocks: Blocks, inputs: _Inputs) -> Any:
    """(M,) ids -> (M, C)."""
    spec = blocks.spec
    x = blocks.op("embedding", inputs.tokens, blocks.weights["embedding"])
    if spec.embedding.scale != 1:
        x = blocks.op("scale", x, factor=spec.embedding.scale)
    if spec.embedding.bias:
        x = blocks.add(x, blocks.weights["embedding_bias"])
    if spec.embedding.width:
        x = blocks.linear(x, "project_in")
    if spec.position.kind == "learned":
        x = blocks.add(x, blocks.op("embedding", inputs.positions, blocks.weights["positions"]))
    return blocks.norm(x, "embedding_norm") if spec.norm.embedding else x


def _layer(layer: Blocks, x: Any, sight: _Sight) -> Any:
    """The sum so far (M, C) -> the sum after a layer."""
    order = layer.spec.wiring.order
    read = layer.pre_norm(x, "attention_norm")
    mixed = layer.given(layer.attention(read, sight), "attention_post_norm")
    if order == "sequential":
        x = layer.summed(x, mixed, "attention_post_norm")
        return layer.summed(x, layer.given(layer.mlp(layer.pre_norm(x, "mlp_norm")), "mlp_post_norm"), "mlp_post_norm")
    read = read if order == "shared" else layer.pre_norm(x, "mlp_norm")
    return layer.add(layer.add(x, mixed), layer.given(layer.mlp(read), "mlp_post_norm"))


def _head(blocks: Blocks, x: Any, inputs: _Inputs) -> Any:
    """(M, C) -> logits (R, V) and argmax (R,) of the rows that want them; an encoder's hidden (R, C) likewise."""
    head = blocks.spec.head
    x = blocks.op("take_rows", x, inputs.logit_rows)
    if blocks.spec.norm.final:
        x = blocks.norm(x, "final_norm")
    if head.kind == "hidden":
        return relax.Tuple([x, blocks.op("argmax", x)])
    if head.transform:
        x = blocks.op("activate", blocks.linear(x, "head_transform"), activation=blocks.spec.mlp.activation)
        x = blocks.norm(x, "head_norm")
    if blocks.spec.embedding.width:
        x = blocks.linear(x, "project_out")
    logits = blocks.op("linear", x, blocks.weights["embedding" if head.tied else "head"])
    if head.bias:
        logits = blocks.add(logits, blocks.weights["head_bias"])
    if head.scale != 1:
        logits = blocks.op("scale", logits, factor=head.scale)
    if head.soft_cap:
        logits = blocks.op("soft_cap", logits, cap=head.soft_cap)
    return relax.Tuple([logits, blocks.op("argmax", logits)])


@dataclass(frozen=True)
class _Sight:
    """What attention of a layer sees, and with what rope."""

    layer: int
    table: Any  # (M, R) of rope, or None
    kv: Any
    inputs: _Inputs
    kv_dtype: str


@dataclass(frozen=True)
class Blocks:
    """The blocks of one layer, or of what is outside layers, over its weights."""

    builder: Any
    spec: ModelSpec
    weights: dict[str, Any]
    prefix: str

    def op(self, name: str, *tensors: Any, **attrs: Any) -> Any:
        """One op of the table."""
        return ops.emit(self.builder, name, *tensors, **attrs)

    def add(self, a: Any, b: Any) -> Any:
        """(M, C) + (M, C) or (C,)."""
        return self.builder.emit(relax.op.add(a, b))

    def norm(self, x: Any, name: str) -> Any:
        """(M, C) -> (M, C)."""
        norm, width = self.spec.norm, int(x.ty.shape[1])
        weight = self.weights.get(self.prefix + name)
        bias = self.weights.get(f"{self.prefix}{name}_bias")
        weight = relax.const(np.ones(width, np.float32)) if weight is None else weight
        if norm.kind == "layer":
            bias = relax.const(np.zeros(width, np.float32)) if bias is None else bias
            return self.op("layer_norm", x, weight, bias, eps=norm.eps)
        y = self.op("rms_norm", x, weight, eps=norm.eps)
        return y if bias is None else self.add(y, bias)

    def pre_norm(self, x: Any, name: str) -> Any:
        """What a block reads of the sum so far."""
        return self.norm(x, name) if self.spec.norm.place in ("pre", "sandwich") else x

    def given(self, y: Any, name: str) -> Any:
        """What a block gives, as it is added."""
        if self.spec.norm.place in ("sandwich", "output"):
            y = self.norm(y, name)
        scale = self.spec.wiring.residual_scale
        return y if scale == 1 else self.op("scale", y, factor=scale)

    def summed(self, x: Any, y: Any, name: str) -> Any:
        """The new sum."""
        total = self.add(x, y)
        return self.norm(total, name) if self.spec.norm.place == "sum" else total

    def linear(self, x: Any, name: str) -> Any:
        """(M, K) -> (M, N), with the bias when the spec has one."""
        y = self.op("linear", x, self.weights[self.prefix + name])
        bias = self.weights.get(f"{self.prefix}{name}_bias")
        return y if bias is None else self.add(y, bias)

    def concat(self, parts: list[Any]) -> Any:
        """Columns side by side."""
        return self.builder.emit(relax.op.concat(parts, axis=1))

    def attention(self, x: Any, sight: _Sight) -> Any:
        """Grouped-query attention over the paged cache: (M, C) -> (M, C)."""
        block, position, inputs, window = self.spec.attention, self.spec.position, sight.inputs, self.spec.window
        sizes = {"heads": block.heads, "kv_heads": block.kv_heads, "head_dim": block.head_dim}
        qkv = self.concat([self.linear(x, name) for name in ("q", "k", "v")])
        if block.clip:
            qkv = self.op("clip", qkv, bound=block.clip)
        if block.qk_norm != "none":
            weights = [self.weights[f"{self.prefix}{name}_norm"] for name in "qk"]
            norm = self.spec.norm
            qkv = self.op("qk_norm", qkv, *weights, **sizes, eps=norm.eps, kind=norm.kind, span=block.qk_norm)
        if sight.table is not None:
            qkv = self.op(
                "rope", qkv, sight.table,
                rotated_heads=block.heads + block.kv_heads, head_dim=block.head_dim, layout=position.layout,
            )  # fmt: skip
        mixed = self.op(
            "attention", qkv, sight.kv, inputs.seqs, inputs.slots, inputs.page_indptr, inputs.page_ids,
            **sizes, scale=block.scale, window=window.size if window and sight.layer in window.layers else 0,
            kv_dtype=sight.kv_dtype, causal=int(block.causal), soft_cap=block.soft_cap,
            bias=position.kind if position.kind.endswith("alibi") else "none",
        )  # fmt: skip
        return self.linear(mixed, "o")

    def mlp(self, x: Any) -> Any:
        """(M, C) -> (M, C)."""
        if f"{self.prefix}router" in self.weights:
            return experts_mlp(self, x)
        kind, activation = self.spec.mlp.kind, self.spec.mlp.activation
        if kind == "plain":
            return self.linear(self.op("activate", self.linear(x, "up"), activation=activation), "down")
        gate_up = self.concat([self.linear(x, "gate"), self.linear(x, "up")])
        return self.linear(self.op("gated", gate_up, activation=activation), "down")
