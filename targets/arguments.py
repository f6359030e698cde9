"""How every kernel begins."""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T


def arguments(dtypes: list[str], shapes: list[Any]) -> list[Any]:
    """The operands' buffers and then the outputs', inside a `T.prim_func()`; no two of them overlap."""
    T.func_attr({"tirx.noalias": True})
    handles = [T.arg(f"a{i}", T.handle()) for i in range(len(dtypes))]
    return [T.match_buffer(h, s, d) for h, s, d in zip(handles, shapes, dtypes, strict=True)]
