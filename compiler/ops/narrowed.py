"""Ops whose last result, rows of floats, is fused with the op that stores it in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llmc.compiler.ops import core
from llmc.compiler.ops.op import Attr, Op, Result, Shape

MULTIPLIED = ("activate", "gated", "bounded_gated")  # those that are fused with the matrix they are of, too
NARROWED = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", *MULTIPLIED)


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


def after_linear(linear: str, name: str) -> str:
    """The op that is `linear` and then the op `name` of its result.

    >>> after_linear("i8_linear", "gated_i8")
    'i8_linear_gated_i8'
    """
    return f"{linear}_{name}"


def linear_then(linear: Op, last: Op) -> Op:
    """The row of these two as one."""

    def result(shapes: list[Shape], attrs: dict[str, Attr]) -> Result:
        return last.result([shape for shape, _ in linear.result(shapes, attrs)], attrs)

    def both(*arrays: Any, format: str, width: int, **attrs: Attr) -> Any:
        return last.meaning(linear.meaning(*arrays, format=format, width=width), **attrs)

    return Op(
        after_linear(linear.name, last.name),
        linear.operands,
        (*linear.attrs, *last.attrs),
        result,
        both,
        f"{last.name} of the result of {linear.name}",
        f"fusion of {linear.name} and {last.name}",
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
