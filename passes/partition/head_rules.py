"""How ops that know of heads are written for a device that has some of them: attention, rope, norms of heads, pages.

What an op is told of heads follows from the columns wanted of it: those of whole heads, in the old order, some twice
where devices have copies of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmc.passes.partition.reading import ATTENDING, CONVOLVING
from llmc.passes.partition.shares import Heads, Ranges, length, scaled, within

if TYPE_CHECKING:
    from llmc.passes.partition.rewriting import Rewriting

Found = tuple[Any, list[Any], dict[str, Any]]


def _attention(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (rows, pool, *others), attrs = found
    heads, kv_heads, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    pages, own = to.of_layer(pool)
    read = own.queries(size) + own.keys(size, heads * size) + own.keys(size, (heads + kv_heads) * size)
    index, more = others[:5], others[5:]
    by_head = [to.constant(each, 0, own.queries(1)) for each in more]
    told = {**attrs, **_counts(own), **_slopes(own, attrs)}
    return to.op(op.name, [to.split(rows, read), pages, *map(to.whole, index), *by_head], **told)


def _counts(own: Heads) -> dict[str, int]:
    return {"heads": own.count, "kv_heads": len(own.kv)}


def _slopes(own: Heads, attrs: dict[str, Any]) -> dict[str, str]:
    """alibi's slopes are those of the heads' numbers among all."""
    if not str(attrs.get("bias", "none")).endswith("alibi"):
        return {}
    return {"bias": f"{attrs['bias']}@{own.first}/{attrs['heads']}"}


def _cross_attention(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (rows, pool, *others), attrs = found
    pages, own = to.of_layer(pool)
    return to.op(op.name, [to.split(rows, columns), pages, *map(to.whole, others)], **{**attrs, **_counts(own)})


def _rope(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (x, table), attrs = found
    size = int(attrs["head_dim"])
    turned = length(within(columns, 0, int(attrs["rotated_heads"]) * size)) // size
    return to.op(op.name, [to.split(x, columns), to.whole(table)], **{**attrs, "rotated_heads": turned})


def _grow_queries(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (x, *others), attrs = found
    grown = length(within(columns, 0, int(attrs["columns"])))
    return to.op(op.name, [to.split(x, columns), *map(to.whole, others)], **{**attrs, "columns": grown})


def _qk_norm(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (x, *weights), attrs = found
    told, queries, keys = _queries_and_keys(columns, attrs)
    if attrs["span"] == "head":
        normed = [to.whole(weight) for weight in weights]
    else:
        normed = [to.constant(weight, 0, part) for weight, part in zip(weights, (queries, keys), strict=True)]
    return to.op(op.name, [to.split(x, columns), *normed], **{**attrs, **told})


def _queries_and_keys(columns: Ranges, attrs: dict[str, Any]) -> tuple[dict[str, int], Ranges, Ranges]:
    """What of rows (M, (H + 2G) D) are queries and keys: their counts, and their columns among all of them."""
    heads, kv_heads, size = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    queries = within(columns, 0, heads * size)
    keys = within(columns, heads * size, (heads + kv_heads) * size)
    return {"heads": length(queries) // size, "kv_heads": length(keys) // size}, queries, keys


def _qk_bias(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, biases, attrs = found
    told, queries, keys = _queries_and_keys(columns, attrs)
    shared = [int(bias.ty.shape[0]) == int(attrs["head_dim"]) for bias in biases]
    parts = [
        to.whole(bias) if of_all else to.constant(bias, 0, part)
        for bias, of_all, part in zip(biases, shared, (queries, keys), strict=True)
    ]
    return to.op(op.name, parts, **{**attrs, **told})


def _relative_bias(to: Rewriting, found: Found, ranges: Ranges) -> Any:
    op, (table,), attrs = found
    return to.op(op.name, [to.constant(table, 1, ranges)], **attrs)


def _gate_rows(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (x, gate), attrs = found
    slices = scaled(columns, 1, int(x.ty.shape[1]) // int(gate.ty.shape[1]))
    return to.op(op.name, [to.split(x, columns), to.split(gate, slices)], **attrs)


def _head_linear(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (x, weight), attrs = found
    heads = int(attrs["heads"])
    rows, size = int(weight.ty.shape[0]) // heads, int(x.ty.shape[1]) // heads
    own = scaled(columns, size, rows)
    return to.op(op.name, [to.split(x, own), to.constant(weight, 0, columns)], heads=length(columns) // rows)


def _latent_rows(to: Rewriting, found: Found, columns: Ranges) -> Any:
    """Columns of query heads; the key that all share, and the value, which are wanted whole."""
    op, (queries, rotated, latent), attrs = found
    heads, size = int(attrs["heads"]), int(latent.ty.shape[1])
    turned = int(rotated.ty.shape[1]) // (heads + 1)
    own = within(columns, 0, heads * (size + turned))
    both = (*scaled(own, turned, size + turned), (heads * turned, (heads + 1) * turned))
    parts = [to.split(queries, scaled(own, size, size + turned)), to.split(rotated, both), to.whole(latent)]
    return to.op(op.name, parts, heads=length(own) // (size + turned))


def _store_kv(to: Rewriting, tensors: list[Any], attrs: dict[str, Any]) -> Any:
    rows, pool, *others = tensors
    pages, own = to.of_layer(pool)
    size, all_heads = int(attrs["head_dim"]), int(attrs["kv_heads"])
    read = own.keys(size) + own.keys(size, all_heads * size)
    told = {**attrs, "kv_heads": len(own.kv)}
    return to.op("store_kv", [_rows(to, rows, read), pages, *map(to.whole, others)], **told)


def _rows(to: Rewriting, rows: Any, columns: Ranges) -> Any:
    return to.whole(rows) if to.cut.alone else to.split(rows, columns)


def _load_keys(to: Rewriting, found: Found, columns: Ranges) -> Any:
    op, (pool, ids), attrs = found
    pages, own = to.of_layer(pool)
    return to.op(op.name, [pages, to.whole(ids)], **{**attrs, "kv_heads": len(own.kv)})


def _store_keys(to: Rewriting, tensors: list[Any], attrs: dict[str, Any]) -> Any:
    rows, pool, *others = tensors
    pages, own = to.of_layer(pool)
    told = {**attrs, "kv_heads": len(own.kv)}
    read = own.keys(int(attrs["head_dim"]))
    return to.op("store_keys", [_rows(to, rows, read), pages, *map(to.whole, others)], **told)


def _copy_pages(to: Rewriting, tensors: list[Any], attrs: dict[str, Any]) -> Any:
    pool, *others = tensors
    return to.op("copy_pages", [to.of_layer(pool)[0], *map(to.whole, others)], **attrs)


# Written for columns of what they give.
SPLIT: dict[str, Callable[[Rewriting, Found, Ranges], Any]] = {
    **dict.fromkeys(ATTENDING, _attention),
    "cross_attention": _cross_attention,
    "rope": _rope,
    "grow_queries": _grow_queries,
    "qk_norm": _qk_norm,
    "gate_rows": _gate_rows,
    "head_linear": _head_linear,
    "latent_rows": _latent_rows,
    "load_keys": _load_keys,
}

# Of these also where nothing says so: whoever reads what they give wants heads of it.
WANTED_SPLIT = ("latent_rows", "rope", "grow_queries")

# Of weights alone: for ranges of their first axis.
CONSTANT: dict[str, Callable[[Rewriting, Found, Ranges], Any]] = {"qk_bias": _qk_bias, "relative_bias": _relative_bias}


def _alone(name: str) -> Callable[[Rewriting, list[Any], dict[str, Any]], Any]:
    """The op on this device's pages where it has all heads of its stage."""

    def write(to: Rewriting, tensors: list[Any], attrs: dict[str, Any]) -> Any:
        parts = [to.of_layer(part)[0] if to.reading.layer(part) is not None else to.whole(part) for part in tensors]
        return to.op(name, parts, **attrs)

    return write


# Written whole: they read or write pages.
TOUCHING: dict[str, Callable[[Rewriting, list[Any], dict[str, Any]], Any]] = {
    **{name: _alone(name) for name in (*ATTENDING, CONVOLVING, "cross_attention", "load_keys")},
    "store_kv": _store_kv,
    "store_keys": _store_keys,
    "copy_pages": _copy_pages,
}
