"""Ops whose last result, rows of floats, is fused with the op that stores it in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llmc.compiler.ops import core
from llmc.compiler.ops.op import Attr, Op, Result, Shape

NARROWED = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "activate", "gated", "bounded_gated")


def narrowed(store: str, ending: str, limits: str, more: Iterable[Op] = ()) -> tuple[Op, ...]:
    """A row for each of NARROWED and `more`, its name with `ending`: what `store`, an op of core.py, makes of its last
    result.

    limits: the end of what each says, on the widths that it is for.
    """
    last = next(op for op in core.ROWS if op.name == store)
    return tuple(
        Op(
            plain.name + ending,
            plain.operands,
            plain.attrs,
            _result(plain, last),
            _meaning(plain, last),
            f"{plain.name}, its last result as {store} gives it{limits}",
            f"fusion of {plain.name} and {store}",
        )
        for plain in (*(op for op in core.ROWS if op.name in NARROWED), *more)
    )


def _result(plain: Op, store: Op) -> Callable[[list[Shape], dict[str, Attr]], Result]:
    def result(shapes: list[Shape], attrs: dict[str, Attr]) -> Result:
        *others, (last, _) = plain.result(shapes, attrs)
        return [*others, *store.result([last], {})]

    return result


def _meaning(plain: Op, store: Op) -> Callable[..., Any]:
    def both(*arrays: Any, **attrs: Attr) -> Any:
        *others, last = _all_of(plain.meaning(*arrays, **attrs))
        results = (*others, *_all_of(store.meaning(last)))
        return results if len(results) > 1 else results[0]

    return both


def _all_of(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)
