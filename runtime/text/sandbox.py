"""A Jinja environment for templates nobody vouches for: bounded in time, in output, and in what it can build.

Jinja's sandbox keeps a template away from Python's insides. What it leaves open is work without end, so every loop,
call and operator here draws on a budget (CVE-2024-34359 and its kind; https://jinja.palletsprojects.com/sandbox).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARS = 4_000_000  # of the output, and of every text built on the way
MAX_TOTAL = 250_000_000  # characters and elements of all values built in one rendering
MAX_SECONDS = 3.0
MAX_STEPS = 500_000  # loop rounds, calls and filters
_MAX_INT = 1_000_000  # as an argument of a call: widths, counts
_MAX_POWER = 64
_MAX_SOURCE_CHARS = 1_000_000
_COUNTED, _BOUNDED = "llmc_counted", "llmc_bounded"


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.steps = 0
        self.built = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        """Count one step. Raises SecurityError when it was one too many, or too late."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} loop rounds and calls")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"longer than {MAX_SECONDS:g} seconds")

    def build(self, size: int) -> None:
        """Count a value of `size` characters or elements."""
        self.built += size
        self.spend()
        if size > MAX_CHARS or self.built > MAX_TOTAL:
            raise SecurityError(f"a value of {size} elements, {self.built} in all")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment for one rendering: its budget is spent once."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.budget = Budget()
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.globals["namespace"] = _Namespace
        self.filters["join"] = _join
        self.filters["sum"] = _sum
        self.filters = {name: self._watched(name, function) for name, function in self.filters.items()}
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
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        target, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(target, str):
            if name == "join" and len(args) == 1:
                args = (list(args[0]),)
            _check_growth(name, target, (*args, *kwargs.values()))
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
            _check_growth("format", left, right if isinstance(right, tuple) else (right,))
        return self._bounded(super().call_binop(context, operator, left, right))

    def _watched(self, name: str, function: Any) -> Any:
        """A filter that counts as a call. Jinja reads its marks, such as pass_context, from its attributes."""
        marks = getattr(function, "__dict__", {})
        own = 2 if "jinja_pass_arg" in marks else 1  # arguments before those the template writes

        def run(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend()
            _check_arguments(args[own:], kwargs)
            if isinstance(args[own - 1], str):
                _check_growth(name, args[own - 1], (*args[own:], *kwargs.values()))
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
        self.budget.build(_weight(value))
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
    """Wraps what loops run over, and what `~`, block assignments and literals build."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """`for x in y` -> `for x in y|llmc_counted`."""
        self.generic_visit(node)
        node.iter = _filter(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` -> `(a ~ b)|llmc_bounded`."""
        self.generic_visit(node)
        return _filter(node, _BOUNDED)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """`[a, b]` -> `[a, b]|llmc_bounded`: nesting lists in lists doubles what they print."""
        self.generic_visit(node)
        return _filter(node, _BOUNDED)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """As visit_List."""
        self.generic_visit(node)
        return _filter(node, _BOUNDED)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """As visit_List, for tuples that are values and not targets."""
        self.generic_visit(node)
        return _filter(node, _BOUNDED) if node.ctx == "load" else node

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


class _Namespace(Namespace):
    """Jinja's namespace without its way of printing everything in it, which can double with every nesting."""

    def __repr__(self) -> str:
        return "<namespace>"


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    """Jinja's filter `join`, which looks at the size first."""
    items = list(value)
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
    _check_growth("join", str(d), (items,))
    return str(d).join(map(str, items))


@jinja2.pass_environment
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Jinja's filter `sum`, for numbers only: lists would be copied again and again."""
    if not isinstance(start, (int, float)):
        raise SecurityError("a sum of something else than numbers")
    items = iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    return sum(items, start)


def _check_growth(name: str, text: str, arguments: tuple[Any, ...]) -> None:
    """Refuse a method or filter of `text` whose result could be far larger than what goes in."""
    if name in ("format", "format_map"):
        _check_width(text)
    if name == "join" and arguments:
        size = _weight(arguments[0]) + len(text) * _size(arguments[0])
    else:
        size = _places(name, text, arguments) * max([0, *(_weight(a) + _amount(a) for a in arguments)])
    if size > MAX_TOTAL:
        raise SecurityError(f"{name} of up to {size} characters")


def _places(name: str, text: str, arguments: tuple[Any, ...]) -> int:
    """How often an argument may come to stand in the result."""
    if name == "replace" and arguments and isinstance(arguments[0], str):
        return text.count(arguments[0])
    marks = {"format": "{%", "format_map": "{", "indent": "\n", "expandtabs": "\t"}.get(name, "")
    if name in ("translate", "wordwrap"):
        return len(text)
    return sum(text.count(mark) for mark in marks)


def _check_width(text: str) -> None:
    """Refuse a format whose fields would be huge, such as "%1000000000d", or whose widths come from elsewhere."""
    if sum(int(digits[:12]) for digits in re.findall("[0-9]+", text)) > MAX_CHARS and re.search("[%{]", text):
        raise SecurityError("a format with a huge width")
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{", text):
        raise SecurityError("a format with a computed width")


def _is_large(value: Any, limit: int) -> bool:
    return isinstance(value, (int, float)) and abs(value) > limit


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _weight(value: Any) -> int:
    """Characters and elements in a value, counted as often as they would print; it stops above MAX_CHARS."""
    if not isinstance(value, (list, tuple, dict)):
        return _size(value)
    total, open_ones = 0, [value]
    while open_ones and total <= MAX_CHARS:
        inner = open_ones.pop()
        total += 1 + _size(inner)
        if isinstance(inner, dict):
            open_ones += [*inner.keys(), *inner.values()]
        elif isinstance(inner, (list, tuple)):
            open_ones += inner
    return total


def _amount(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0
