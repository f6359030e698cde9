"""Ops -> CUDA kernels: which there are, and the lowering of a module by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tvm
from tvm import tirx

from llmc.compiler.errors import LlmcError
from llmc.compiler.ops import PREFIX
from llmc.compiler.ops.narrowed import MULTIPLIED, after_linear
from llmc.compiler.ops.rounded import ENDING, LINEAR
from llmc.targets.cuda import (
    attention,
    elementwise,
    embedding,
    experts,
    experts_bias,
    heads,
    linear,
    norms,
    rope,
    rotate_rows,
    routing,
    short_convolution,
    top,
    turn_keys,
)
from llmc.targets.cuda.target import CudaTarget
from llmc.targets.cuda.workspace import with_workspaces
from llmc.targets.lower import calls, fresh_shapes, lower_with

Kernel = Callable[[CudaTarget, list[Any], dict[str, Any]], tirx.PrimFunc]

KERNELS: dict[str, Kernel] = {
    "rms_norm": norms.rms_norm,
    "layer_norm": norms.layer_norm,
    "add_rms_norm": norms.add_rms_norm,
    "add_layer_norm": norms.add_layer_norm,
    "qk_norm": norms.qk_norm,
    "scale": elementwise.scale,
    "clip": elementwise.clip,
    "soft_cap": elementwise.soft_cap,
    "xielu": elementwise.xielu,
    "take_rows": elementwise.take_rows,
    "take_columns": elementwise.take_columns,
    "own_ids": elementwise.own_ids,
    "round_rows": elementwise.round_rows,
    "rotate_rows": rotate_rows.rotate_rows,
    "rope_table": rope.rope_table,
    "rope": rope.rope,
    "sinusoid": rope.sinusoid,
    "attention": attention.attention,
    "rope_attention": attention.rope_attention,
    "attention_with_sinks": attention.attention_with_sinks,
    "attention_by_distance": attention.attention_by_distance,
    "cross_attention": attention.cross_attention,
    "store_kv": attention.store_kv,
    "short_convolution": short_convolution.short_convolution,
    "grow_queries": rope.grow_queries,
    "load_keys": turn_keys.load_keys,
    "store_keys": turn_keys.store_keys,
    "copy_pages": turn_keys.copy_pages,
    "argmax": top.argmax,
    "top": top.top,
    "packed_embedding": embedding.packed_embedding,
    "packed_linear": linear.packed_linear,
    "bf16_linear": linear.bf16_linear,
    "route": routing.route,
    "gate_rows": routing.gate_rows,
    "experts_bias": experts_bias.experts_bias,
    "experts_out_bias": experts_bias.experts_out_bias,
    **experts.KERNELS,
    **heads.KERNELS,
}
_ACTIVATED: dict[str, Callable[..., tirx.PrimFunc]] = {
    name: partial(elementwise.activated, name) for name in elementwise.ACTIVATED
}
KERNELS |= _ACTIVATED

_ROUNDED: dict[str, Callable[..., tirx.PrimFunc]] = {
    "rms_norm": norms.rms_norm,
    "add_rms_norm": norms.add_rms_norm,
    "layer_norm": norms.layer_norm,
    "add_layer_norm": norms.add_layer_norm,
    **_ACTIVATED,
    "attention": attention.attention,
    "rope_attention": attention.rope_attention,
}
KERNELS |= {name + ENDING: partial(kernel, rounded=True) for name, kernel in _ROUNDED.items()} | {
    after_linear(LINEAR, name + ENDING): partial(linear.bf16_linear, then=name) for name in MULTIPLIED
}

# Relax's own operations that are lowered as ours are.
PLAIN: dict[str, Kernel] = {"add": elementwise.add, "concat": elementwise.concat}

# What the runtime calls by name between GPUs that exchange (runtime/cuda/exchange.py), for any sizes.
ADD_PARTS = "add_parts"


def make_kernel(name: str, target: CudaTarget, shapes: list[list[Any]], attrs: dict[str, Any]) -> tirx.PrimFunc:
    """The kernel of an op for these shapes (operands, then outputs). Raises LlmcError where there is none."""
    made = (KERNELS | PLAIN | {ADD_PARTS: elementwise.add_parts}).get(name)
    if made is None:
        raise LlmcError(f"{name}: no CUDA kernel yet (docs/cuda.md lists those there are)")
    return made(target, fresh_shapes(shapes), attrs)


def lower(module: tvm.IRModule, target: CudaTarget) -> tvm.IRModule:
    """A module of packed ops -> the same over CUDA kernels. Raises LlmcError naming what there is no kernel for.

    Where devices exchange what they have, with ADD_PARTS.
    """
    made = lower_with(
        module, frozenset(KERNELS),
        lambda name, shapes, attrs: with_workspaces(make_kernel(name, target, shapes, attrs)),
        "targets/cuda/lower.py",
    )  # fmt: skip
    if calls(module) & {f"{PREFIX}all_reduce", f"{PREFIX}all_gather"}:
        made[ADD_PARTS] = add_parts(target).with_attr("global_symbol", ADD_PARTS)
    return made


def add_parts(target: CudaTarget) -> tirx.PrimFunc:
    """ADD_PARTS, for any number of parts (N, M)."""
    count, size = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    return make_kernel(ADD_PARTS, target, [[count, size], [size]], {})
