"""How each op is written whole, split by columns, as an addend, and by experts. Letters as in compiler/ops/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax

from llmc.compiler import ops
from llmc.compiler.errors import LlmcError
from llmc.passes.partition import head_rules
from llmc.passes.partition.natural import BY_COLUMN, GATED, Kind
from llmc.passes.partition.shares import Ranges, within

if TYPE_CHECKING:
    from llmc.passes.partition.rewriting import Rewriting


def whole(to: Rewriting, x: Any) -> Any:
    """The op on whole operands, or on this device's pages."""
    value = to.reading.bound[x]
    found = ops.match(value)
    if found is None:
        return to.emit(_plain(value, [to.whole(part) for part in _fields(value)]))
    op, tensors, attrs = found
    if op.name in head_rules.TOUCHING:
        return head_rules.TOUCHING[op.name](to, tensors, attrs)
    return to.op(op.name, [to.whole(tensor) for tensor in tensors], **attrs)


def _fields(value: Any) -> list[Any]:
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    return list(value.args) if value.op.name == "relax.add" else list(value.args[0].fields)


def _plain(value: Any, parts: list[Any]) -> Any:
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(parts[0], int(value.index))
    return relax.op.add(*parts) if value.op.name == "relax.add" else relax.op.concat(parts, int(value.attrs.axis))


def split(to: Rewriting, x: Any, columns: Ranges) -> Any:
    """(M, C) -> (M, those columns)."""
    value = to.reading.bound.get(x)
    found = ops.match(value)
    if found is None and isinstance(value, relax.Call) and value.op.name == "relax.concat":
        return _split_concat(to, value, columns)
    name = found[0].name if found else ""
    if value is None or (to.nature.of(x) in (Kind.WHOLE, Kind.EXPERTS) and name not in head_rules.WANTED_SPLIT):
        return to.taken(x, columns)
    if found is None:
        left, right = value.args
        return to.emit(relax.op.add(to.split(left, columns), to.constant(right, 0, columns)))
    op, tensors, attrs = found
    if op.name == "linear":
        return to.op("linear", [to.whole(tensors[0]), to.constant(tensors[1], 0, columns)])
    if op.name in BY_COLUMN:
        return to.op(op.name, [to.split(tensors[0], columns), *map(to.whole, tensors[1:])], **attrs)
    if op.name in GATED:
        width = int(tensors[0].ty.shape[1]) // 2
        both = tuple((first + half, end + half) for half in (0, width) for first, end in columns)
        return to.op(op.name, [to.split(tensors[0], both)], **attrs)
    return head_rules.SPLIT[op.name](to, found, columns)


def _split_concat(to: Rewriting, value: Any, columns: Ranges) -> Any:
    parts, before = [], 0
    for part in value.args[0].fields:
        width = int(part.ty.shape[1])
        ranges = within(columns, before, before + width)
        if ranges:
            parts.append(to.split(part, ranges))
        before += width
    return parts[0] if len(parts) == 1 else to.emit(relax.op.concat(parts, axis=1))


def partial(to: Rewriting, x: Any) -> Any:
    """(M, C) -> (M, C), which the devices' together sum to."""
    value = to.reading.bound[x]
    found = ops.match(value)
    if found is None:
        return to.emit(relax.op.add(*(to.partial(part) for part in value.args)))
    op, (first, *others), attrs = found
    if op.name == "linear":
        natural = to.nature.of(first)
        columns = natural if isinstance(natural, tuple) else (to.cut.columns(int(first.ty.shape[1])),)
        return to.op("linear", [to.split(first, columns), to.constant(others[0], 1, columns)])
    if op.name == "embedding":
        begin, end = to.cut.rows(int(others[0].ty.shape[0]))
        ids = to.op("own_ids", [to.whole(first)], first=begin, count=end - begin)
        return to.op("embedding", [ids, to.constant(others[0], 0, ((begin, end),))])
    if op.name in ("experts_out", "experts_out_bias"):
        left = to.own(first) if op.name == "experts_out" else to.partial(first)
        return _of_experts(to, op.name, left, others, attrs)
    return to.op(op.name, [to.partial(first), *map(to.whole, others)], **attrs)


def own(to: Rewriting, x: Any) -> Any:
    """(M, U F), in which slices of other devices' experts mean nothing."""
    value = to.reading.bound[x]
    found = ops.match(value)
    if found is None:
        return to.emit(relax.op.concat([to.own(part) for part in value.args[0].fields], axis=1))
    op, (first, *others), attrs = found
    if op.name in ("experts_in", "experts_bias"):
        left = to.whole(first) if op.name == "experts_in" else to.own(first)
        return _of_experts(to, op.name, left, others, attrs)
    if op.name in (*GATED, *BY_COLUMN):
        return to.op(op.name, [to.own(first), *map(to.whole, others)], **attrs)
    raise LlmcError(f"llmc.{op.name} between the matrices of experts: they cannot be shared by expert")


def _of_experts(to: Rewriting, name: str, left: Any, others: list[Any], attrs: dict[str, Any]) -> Any:
    """An op of experts on ids, what else a row has for them, and this device's rows of the last operand."""
    ids, *shares, weight = others
    count = int(attrs["experts"])
    begin, end = to.cut.experts(count)
    own_ids = to.op("own_ids", [to.whole(ids)], first=begin, count=end - begin)
    rows = int(weight.ty.shape[0]) // count
    mine = to.constant(weight, 0, ((begin * rows, end * rows),))
    return to.op(name, [left, own_ids, *map(to.whole, shares), mine], experts=end - begin)


def constant(to: Rewriting, x: Any, axis: int, ranges: Ranges) -> Any:
    """Ranges of an axis of what an op makes of weights alone."""
    found = ops.match(to.reading.bound.get(x))
    if found is not None and found[0].name in head_rules.CONSTANT:
        return head_rules.CONSTANT[found[0].name](to, found, ranges)
    raise LlmcError(f"{x.name}: a part of what is neither a weight nor made of weights")
