"""The ordered table of passes, each with the reason for its place. `targets/lower.py` follows when it is done.

For several devices partition/ comes before all of these, and each device's module goes through them by itself.
"""

from __future__ import annotations

import tvm
from tvm import relax

from llmc.compiler.pipeline import Stage
from llmc.passes.fuse_activation import fuse_activation
from llmc.passes.fuse_add_norm import fuse_add_norm
from llmc.passes.fuse_linears import Choose, fuse_linears
from llmc.passes.fuse_quantize import fuse_quantize
from llmc.passes.lift_weights import lift_weights
from llmc.passes.pack_weights import pack_weights


def drop_dead(module: tvm.IRModule) -> tvm.IRModule:
    """Bindings nobody reads, gone (TVM's own pass)."""
    return relax.transform.DeadCodeElimination()(module)


def stages(choose: Choose, exact: bool = False) -> list[Stage]:
    """The pipeline for one choice of weight formats: `choose(weight name) -> format name`.

    `exact`: activations stay float32 where block formats would round them to int8.
    """
    return [
        Stage("drop_dead", drop_dead, "first: what a spec switches off must not be packed or timed"),
        Stage(
            "fuse_linears", lambda m: fuse_linears(m, choose), "before pack_weights: it joins plain float32 matrices"
        ),
        Stage("fuse_add_norm", fuse_add_norm, "any time before lowering"),
        Stage("pack_weights", lambda module: pack_weights(module, choose, exact), "after fusion: each matrix is final"),
        Stage("fuse_quantize", fuse_quantize, "after pack_weights, which says what is rounded to int8"),
        Stage("fuse_activation", fuse_activation, "after fuse_quantize: it fuses what that has made"),
        Stage("lift_weights", lift_weights, "last: everything about weights stands in the graph by now"),
    ]
