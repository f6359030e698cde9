"""A Jinja environment for templates nobody vouches for: bounded in time, in output, and in what it can build.

Jinja's sandbox keeps a template away from Python's insides. What it leaves open is work without end, so every loop,
call and operator here draws on a budget (CVE-2024-34359 and its kind; https://jinja.palletsprojects.com/sandbox).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 4_000_000  # of the output, and of every text built on the way
MAX_SECONDS = 5.0
MAX_STEPS = 2_000_000  # loop rounds, calls and filters
_MAX_INT = 1_000_000  # as an argument of a call: widths, counts
_MAX_POWER = 64
_MAX_SOURCE_CHARS = 1_000_000
_COUNTED, _BOUNDED = "llmc_counted", "llmc_bounded"


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.steps = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        """Count one step. Raises SecurityError when it was one too many, or too late."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} loop rounds and calls")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"longer than {MAX_SECONDS:g} seconds")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment for one rendering: its budget is spent once."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.budget = Budget()
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.filters = {name: self._watched(function) for name, function in self.filters.items()}
        self.filters[_COUNTED] = self._counted
        self.filters[_BOUNDED] = self._bounded

    def bounded_template(self, source: str) -> jinja2.Template:
        """The template, with every loop counted and every text it builds measured."""
        if len(source) > _MAX_SOURCE_CHARS:
            raise SecurityError(f"a template of {len(source)} characters")
        tree = _Guard().visit(self.parse(source))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call written in the template; the odd names leave every keyword to the callee, as in Jinja."""
        __self.budget.spend()
        _check_arguments(args, kwargs)
        return __self._bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator written in the template, refused when its result would be huge."""
        self.budget.spend()
        if operator == "**" and (_is_large(left, _MAX_INT) or _is_large(right, _MAX_POWER)):
            raise SecurityError("a power of large numbers")
        if operator == "*":
            size = _size(left) * _amount(right) + _size(right) * _amount(left)
            if size > MAX_CHARS:
                raise SecurityError(f"a product of {size} elements")
        if operator == "%" and isinstance(left, str):
            _check_width(left)
        return self._bounded(super().call_binop(context, operator, left, right))

    def _watched(self, function: Any) -> Any:
        """A filter that counts as a call. Jinja reads its marks, such as pass_context, from its attributes."""
        marks = getattr(function, "__dict__", {})
        own = 2 if "jinja_pass_arg" in marks else 1  # arguments before those the template writes

        def run(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend()
            _check_arguments(args[own:], kwargs)
            return self._bounded(function(*args, **kwargs))

        run.__dict__.update(marks)
        return run

    def _counted(self, iterable: Any) -> Any:
        return _Counted(iterable, self.budget) if hasattr(iterable, "__len__") else self._rounds(iterable)

    def _rounds(self, iterable: Any) -> Iterator[Any]:
        for item in iterable:
            self.budget.spend()
            yield item

    def _bounded(self, value: Any) -> Any:
        if _size(value) > MAX_CHARS:
            raise SecurityError(f"a value of {_size(value)} elements")
        if isinstance(value, int) and value.bit_length() > 4096:
            raise SecurityError(f"a number of {value.bit_length()} bits")
        return value


class _Counted:
    """An iterable with a length whose rounds are counted."""

    def __init__(self, items: Any, budget: Budget) -> None:
        self._items, self._budget = items, budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.spend()
            yield item


class _Guard(NodeTransformer):
    """Wraps what loops run over, and the texts that `~` and block assignments build."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """`for x in y` -> `for x in y|llmc_counted`."""
        self.generic_visit(node)
        node.iter = _filter(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` -> `(a ~ b)|llmc_bounded`."""
        self.generic_visit(node)
        return _filter(node, _BOUNDED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """`{% set x %}` -> `{% set x | llmc_bounded %}`."""
        self.generic_visit(node)
        node.filter = _filter(node.filter, _BOUNDED)
        return node


def _filter(value: Any, name: str) -> nodes.Filter:
    line = value.lineno if value is not None else 1
    return nodes.Filter(value, name, [], [], None, None, lineno=line)


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if _is_large(value, _MAX_INT):
            raise SecurityError("a call with a huge number")


def _check_width(text: str) -> None:
    """Refuse `"%1000000000d" % 1`: a field width of more than six digits."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 6:
            raise SecurityError("a format with a huge width")


def _is_large(value: Any, limit: int) -> bool:
    return isinstance(value, (int, float)) and abs(value) > limit


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _amount(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0
