"""KV pages in CUDA kernels: where a number of K or V lies in a page (compiler/kv_pages.py), read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.launch import bf16_bits, from_bf16

Place = Callable[[Any, Any, int], Any]  # token of the page, element, head size -> where it is, of one kv head


@dataclass(frozen=True)
class Pages:
    """A kind of pages; numbers go through `load` and `store` on their way, `query` is what they are multiplied with."""

    dtype: str
    key: Place
    value: Place
    load: Callable[[Any], Any]
    store: Callable[[Any], Any]
    query: Callable[[Any], Any]


def _same(x: Any) -> Any:
    return x


KINDS = {
    "f32": Pages(
        "float32", lambda token, d, size: d * PAGE + token, lambda token, d, size: token * size + d, _same, _same, _same
    ),
    "bf16": Pages(
        "uint16",
        lambda token, d, size: (T.floordiv(d, 2) * PAGE + token) * 2 + T.floormod(d, 2),
        lambda token, d, size: (T.floordiv(token, 2) * size + d) * 2 + T.floormod(token, 2),
        from_bf16,
        bf16_bits,
        lambda x: from_bf16(bf16_bits(x)),
    ),
}


def pages_of(kind: str) -> Pages:
    """The pages of this kind. Raises LlmcError where CUDA kernels have none."""
    if kind not in KINDS:
        raise LlmcError(f"KV pages {kind!r}: no CUDA kernel yet; give --kv one of: {', '.join(KINDS)}")
    return KINDS[kind]


def zero(pages: Pages) -> Any:
    """Of the pages' dtype: what fills up K where heads are of an odd size."""
    return tirx.const(0, pages.dtype)
