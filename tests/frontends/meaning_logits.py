"""What a model computes by Relax and the ops' NumPy meanings, on the weights that a compile would keep."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from llmc.compiler import ops
from llmc.compiler.formats import block_format, encode
from llmc.frontends.graph.build import build
from llmc.frontends.source import Source

sys.path.insert(0, str(Path(__file__).parent))
from quantized_reading import check_values


def meaning_logits(source: Source, ids: list[int]) -> np.ndarray:
    """(n, V) logits; weights that are kept are as `unpack` makes them, which has to be what `read` gives."""
    spec = source.spec
    weights = []
    for tensor in source.tensors.values():
        values = tensor.read()
        if tensor.kept:
            format = block_format(tensor.kept)
            packed = encode(format, tensor.read_quantized(), *tensor.shape)
            exact, values = values, format.unpack(packed, *tensor.shape)
            check_values(values, exact, tensor.kept)
        weights.append(tvm.runtime.tensor(values))
    ops.register_meanings()
    machine = relax.VirtualMachine(relax.build(build(spec), tvm.target.Target("llvm")), tvm.cpu())
    places = np.arange(len(ids), dtype=np.int32)
    pages = -(-len(ids) // 16)
    page = (pages, 2, spec.attention.kv_heads, 16 * spec.attention.head_dim)
    kv = [tvm.runtime.tensor(np.zeros(page, np.float32)) for _ in range(spec.sizes.layers)]
    listed = np.zeros((1, 2), np.int32), np.array([0, pages], np.int32), np.arange(pages, dtype=np.int32)
    index = [np.array(ids, np.int32), places, np.zeros(len(ids), np.int32), places, *listed, places]
    return np.array(machine["step"](*map(tvm.runtime.tensor, index), kv, *weights)[0].numpy())
