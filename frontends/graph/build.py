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
from llmc.compiler.spec.endless import turns
from llmc.compiler.spec.tensors import encoder_layers
from llmc.frontends.graph.blocks import Blocks, layer_of
from llmc.frontends.graph.encoder import keep_for_crossing
from llmc.frontends.graph.ends import embedding_of, head_of
from llmc.frontends.graph.inputs import Inputs, inputs_of
from llmc.frontends.graph.parts import Passing, parts_of
from llmc.frontends.graph.places import sights
from llmc.frontends.graph.turn import Moves, moves_of, turn

STEP, ENCODE, TURN = "step", "encode", "turn"


def build(spec: ModelSpec, kv_dtype: str = "f32", parts: int | None = None) -> tvm.IRModule:
    """The module with the function `step(inputs..., kv, weights...)` -> (logits (R, V), and of each row as `top` has
    them ids (R, K), values (R, K) and normalizers (R,)), or of a head without logits (hidden (R, C), argmax (R,)).

    With an encoder, also `encode(inputs..., kv, weights...) -> (hidden (R, C), argmax (R,), ...)`, which reads the
    sources that a step's sequences are answers to; what it gives after the first two only says that it wrote. Where
    keys can be turned, `turn(by (16 n,), from_ids (n,), to_ids (n,), kv, weights...)`, see turn.py. With `parts`, the
    step in so many parts too, see parts.py: `embed(tokens, positions, weights...) -> x (M, C)`, `part_k(x, the step's
    inputs but tokens and logit_rows, weights...) -> x` and `head(x, logit_rows, weights...)` -> the step's output.

    Weights are parameters after the inputs (`num_input`), in the order of `tensor_shapes(spec)`, under our names.
    """
    builder = relax.BlockBuilder()
    if spec.encoder:
        _function(builder, spec, ENCODE, inputs_of(spec, kv_dtype, sources=False), kv_dtype, _encode)
    _function(builder, spec, STEP, inputs_of(spec, kv_dtype, sources=spec.encoder is not None), kv_dtype, _step)
    if turns(spec):
        _function(builder, spec, TURN, moves_of(spec, kv_dtype), kv_dtype, turn)
    for name, inputs, body in parts_of(spec, kv_dtype, parts) if parts else ():
        _function(builder, spec, name, inputs, kv_dtype, body)
    return builder.get()


Body = Callable[[Blocks, Any, str], Any]  # (blocks outside layers, inputs, kv_dtype) -> what a function gives


def _function(
    builder: Any, spec: ModelSpec, name: str, inputs: Inputs | Moves | Passing, kv_dtype: str, body: Body
) -> None:
    weights = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in tensor_shapes(spec).items()}
    params = [*inputs.all(), *weights.values()]
    with builder.function(name, params, attrs={"num_input": len(inputs.all())}):
        with builder.dataflow():
            output = builder.emit_output(body(Blocks(builder, spec, weights, ""), inputs, kv_dtype))
        builder.emit_func_output(output)


def _step(outer: Blocks, inputs: Inputs, kv_dtype: str) -> Any:
    spec = outer.spec
    x = embedding_of(outer, outer.weights["embedding"], inputs)
    for sight in sights(outer, range(spec.sizes.layers), inputs, kv_dtype, spec.attention.causal):
        x = layer_of(outer.inside(f"layers.{sight.layer}."), x, sight)
    return head_of(outer, x, inputs)


def _encode(outer: Blocks, inputs: Inputs, kv_dtype: str) -> Any:
    stack = outer.inside("encoder.")
    x = embedding_of(stack, outer.weights.get("encoder.embedding", outer.weights["embedding"]), inputs)
    for sight in sights(stack, range(encoder_layers(outer.spec)), inputs, kv_dtype, causal=False):
        x = layer_of(stack.inside(f"layers.{sight.layer}."), x, sight)
    if outer.spec.norm.final:
        x = stack.norm(x, "final_norm")
    kept = keep_for_crossing(outer, x, inputs, kv_dtype)
    x = outer.op("take_rows", x, inputs.logit_rows)
    return relax.Tuple([x, outer.op("argmax", x), *kept])
