"""Rows of the op table for keys that are turned in the cache. Letters: n pages, G kv heads, D head size."""

from __future__ import annotations

from llmc.compiler.kv_pages import PAGE
from llmc.compiler.meaning import turning as meaning
from llmc.compiler.ops.op import Op

_SIZES = ("kv_heads", "head_dim", "kv_dtype")
_SOURCE = "https://arxiv.org/abs/2309.17453 section 3.2, positions within the cache"

ROWS = (
    Op(
        "load_keys",
        ("kv", "page_ids"),
        _SIZES,
        lambda s, a: [((s[1][0] * PAGE, int(a["kv_heads"]) * int(a["head_dim"])), "float32")],
        meaning.load_keys,
        "K of the tokens of pages page_ids (n,), one after another -> (16 n, G D)",
        _SOURCE,
    ),
    Op(
        "store_keys",
        ("rows", "kv", "from_ids", "to_ids"),
        _SIZES,
        lambda s, a: [((1,), "int32")],
        meaning.store_keys,
        "pages from_ids (n,) written to pages to_ids (n,), with rows (16 n, G D) as K -> (1,) int32, a zero: for its "
        "effect. A page may be written to itself; no other page that is written may be read",
        _SOURCE,
    ),
    Op(
        "copy_pages",
        ("kv", "from_ids", "to_ids"),
        ("kv_dtype",),
        lambda s, a: [((1,), "int32")],
        meaning.copy_pages,
        "pages from_ids (n,) copied to pages to_ids (n,), as store_keys does -> (1,) int32, a zero",
        _SOURCE,
    ),
)
