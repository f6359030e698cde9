"""ModelSpec -> Relax: the step function a model is, written block by block, with no name of a model in sight.

The result is the unlowered graph: plain float32 weights, one op a line of the paper. It runs as it is (slowly) by the
ops' NumPy meanings, and is the twin that every pass and kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from llmc.compiler.spec import ModelSpec, tensor_shapes
from llmc.compiler.spec.tensors import encoder_layers
from llmc.frontends.graph.blocks import Blocks, layer_of
from llmc.frontends.graph.encoder import keep_for_crossing
from llmc.frontends.graph.inputs import Inputs, inputs_of
from llmc.frontends.graph.places import add_positions, sights

STEP, ENCODE = "step", "encode"


def build(spec: ModelSpec, kv_dtype: str = "f32") -> tvm.IRModule:
    """The module with the function `step(inputs..., kv, weights...) -> (logits (R, V), argmax (R,))`.

    With an encoder, also `encode(inputs..., kv, weights...) -> (hidden (R, C), argmax (R,), ...)`, which reads the
    sources that a step's sequences are answers to; what it gives after the first two only says that it wrote. Weights
    are parameters after the inputs (`num_input`), in the order of `tensor_shapes(spec)`, under our names.
    """
    builder = relax.BlockBuilder()
    if spec.encoder:
        _function(builder, spec, ENCODE, inputs_of(spec, kv_dtype, sources=False), kv_dtype, _encode)
    _function(builder, spec, STEP, inputs_of(spec, kv_dtype, sources=spec.encoder is not None), kv_dtype, _step)
    return builder.get()


Body = Callable[[Blocks, Inputs, str], Any]  # (blocks outside layers, inputs, kv_dtype) -> what a function gives


def _function(builder: Any, spec: ModelSpec, name: str, inputs: Inputs, kv_dtype: str, body: Body) -> None:
    weights = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in tensor_shapes(spec).items()}
    params = [*inputs.all(), *weights.values()]
    with builder.function(name, params, attrs={"num_input": len(inputs.all())}):
        with builder.dataflow():
            output = builder.emit_output(body(Blocks(builder, spec, weights, ""), inputs, kv_dtype))
        builder.emit_func_output(output)


def _step(outer: Blocks, inputs: Inputs, kv_dtype: str) -> Any:
    spec = outer.spec
    x = _embed(outer, outer.weights["embedding"], inputs)
    for sight in sights(outer, spec.sizes.layers, inputs, kv_dtype, spec.attention.causal):
        x = layer_of(outer.inside(f"layers.{sight.layer}."), x, sight)
    return _head(outer, x, inputs)


def _encode(outer: Blocks, inputs: Inputs, kv_dtype: str) -> Any:
    stack = outer.inside("encoder.")
    x = _embed(stack, outer.weights.get("encoder.embedding", outer.weights["embedding"]), inputs)
    for sight in sights(stack, encoder_layers(outer.spec), inputs, kv_dtype, causal=False):
        x = layer_of(stack.inside(f"layers.{sight.layer}."), x, sight)
    if outer.spec.norm.final:
        x = stack.norm(x, "final_norm")
    kept = keep_for_crossing(outer, x, inputs, kv_dtype)
    x = outer.op("take_rows", x, inputs.logit_rows)
    return relax.Tuple([x, outer.op("argmax", x), *kept])


def _embed(stack: Blocks, table: Any, inputs: Inputs) -> Any:
    """(M,) ids -> (M, C)."""
    spec = stack.spec
    x = stack.op("embedding", inputs.tokens, table)
    if spec.embedding.scale != 1:
        x = stack.op("scale", x, factor=spec.embedding.scale)
    if spec.embedding.bias:
        x = stack.add(x, stack.weights["embedding_bias"])
    if spec.embedding.width:
        x = stack.linear(x, "project_in")
    x = add_positions(stack, x, inputs)
    return stack.norm(x, "embedding_norm") if spec.norm.embedding else x


def _head(blocks: Blocks, x: Any, inputs: Inputs) -> Any:
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
