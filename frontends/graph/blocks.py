"""The blocks of a layer in the graph: norms, linear layers, attention, the MLP, and how they are put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.spec import ModelSpec
from llmc.frontends.graph.convolution import short_convolution
from llmc.frontends.graph.experts import experts_mlp
from llmc.frontends.graph.heads import gated_heads, grown_queries, qk_norm
from llmc.frontends.graph.inputs import Sight
from llmc.frontends.graph.latent import latent_attention
from llmc.frontends.graph.mlp import plain_mlp


def layer_of(layer: Blocks, x: Any, sight: Sight) -> Any:
    """The sum so far (M, C) -> the sum after a layer."""
    order = layer.spec.wiring.order
    plain = layer.spec.norm.first_plain and sight.layer == 0
    read = x if plain else layer.pre_norm(x, "attention_norm")
    mixed = layer.given(layer.mixing(read, sight), "attention_post_norm")
    if order == "sequential":
        x = layer.summed(x, mixed, "attention_post_norm")
        if f"{layer.prefix}cross_q" in layer.weights:
            crossed = layer.given(layer.cross(layer.pre_norm(x, "cross_norm"), sight), "cross_post_norm")
            x = layer.summed(x, crossed, "cross_post_norm")
        return layer.summed(x, layer.given(layer.mlp(layer.pre_norm(x, "mlp_norm")), "mlp_post_norm"), "mlp_post_norm")
    read = read if order == "shared" else layer.pre_norm(x, "mlp_norm")
    return layer.add(layer.add(x, mixed), layer.given(layer.mlp(read), "mlp_post_norm"))


@dataclass(frozen=True)
class Blocks:
    """The blocks of one layer, or of what is outside layers, over its weights, whose names begin with `prefix`."""

    builder: Any
    spec: ModelSpec
    weights: dict[str, Any]
    prefix: str

    def inside(self, prefix: str) -> Blocks:
        """The blocks of a part."""
        return replace(self, prefix=self.prefix + prefix)

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

    def mixing(self, x: Any, sight: Sight) -> Any:
        """What brings tokens together, attention or a convolution: (M, C) -> (M, C)."""
        convolved = f"{self.prefix}conv" in self.weights
        return short_convolution(self, x, sight) if convolved else self.attention(x, sight)

    def attention(self, x: Any, sight: Sight) -> Any:
        """Attention over the paged cache, grouped-query attention unless it is latent: (M, C) -> (M, C)."""
        block, position = self.spec.attention, self.spec.position
        if block.kind == "mla":
            return latent_attention(self, x, sight)
        qkv = self.concat([self.linear(x, name) for name in ("q", "k", "v")])
        if block.clip:
            qkv = self.op("clip", qkv, bound=block.clip)
        if block.qk_norm_place == "before_rope":
            qkv = qk_norm(self, qkv)
        if sight.table is not None:
            qkv = self.op(
                "rope", qkv, sight.table,
                rotated_heads=block.heads + block.kv_heads, head_dim=block.head_dim, first=0, layout=position.layout,
            )  # fmt: skip
        if block.qk_norm_place == "after_rope":
            qkv = qk_norm(self, qkv)
        return self.linear(gated_heads(self, x, self.mixed(qkv, sight, self.head_sizes())), "o")

    def mixed(self, qkv: Any, sight: Sight, sizes: dict[str, int]) -> Any:
        """Queries, keys and values (M, (H + 2G) D) -> what the heads give (M, H D)."""
        block, position, window = self.spec.attention, self.spec.position, self.spec.window
        attrs: dict[str, Any] = {
            **sizes, "scale": block.scale, "kv_dtype": sight.kv_dtype, "causal": int(sight.causal),
            "window": window.size if window and sight.layer in window.layers else 0, "soft_cap": block.soft_cap,
        }  # fmt: skip
        qkv = grown_queries(self, qkv, sight.inputs.positions, sizes["heads"] * sizes["head_dim"])
        read = [qkv, sight.kv, *sight.pages()]
        if sight.bias is not None:
            return self.op("attention_by_distance", *read, sight.bias, **attrs)
        attrs["bias"] = position.kind if position.kind.endswith("alibi") else "none"
        if block.sinks:
            return self.op("attention_with_sinks", *read, self.weights[f"{self.prefix}sinks"], **attrs)
        return self.op("attention", *read, **attrs)

    def cross(self, x: Any, sight: Sight) -> Any:
        """Attention to what the encoder left of each sequence's source: (M, C) -> (M, C)."""
        mixed = self.op(
            "cross_attention", self.linear(x, "cross_q"), sight.kv, sight.inputs.seqs, *sight.inputs.sources,
            **self.head_sizes(), scale=self.spec.attention.scale, kv_dtype=sight.kv_dtype,
        )  # fmt: skip
        return self.linear(mixed, "cross_o")

    def head_sizes(self) -> dict[str, int]:
        """What ops are told of heads."""
        block = self.spec.attention
        return {"heads": block.heads, "kv_heads": block.kv_heads, "head_dim": block.head_dim}

    def mlp(self, x: Any) -> Any:
        """(M, C) -> (M, C)."""
        if f"{self.prefix}router" in self.weights:
            return experts_mlp(self, x)
        return plain_mlp(self, x)
