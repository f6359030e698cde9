"""Writes docs/spec.md, the reference of the spec file, from the code that reads it.

    python docs/make_spec_page.py

What a key means is its dataclass's docstring, what it may be CHOICES and LIMITS, which tensors a model has TABLE.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmc.compiler import spec
from llmc.compiler.spec import ModelSpec, example, to_toml
from llmc.compiler.spec import sources as spec_sources
from llmc.compiler.spec.limits import CHOICES, LIMITS, SWITCHES
from llmc.compiler.spec.tensors import ATTENTION, CONVOLUTION, EXPERTS, PLAIN_MLP, TABLE

PAGE = Path(__file__).with_name("spec.md")

OPENING = """\
# The spec

A spec says everything about a model except the numbers in its weights: which blocks it is made of, their settings,
and what its files call its tensors. It is a TOML file. llmc derives one from `config.json` or from a GGUF file's
metadata; a model whose family it does not know needs no code, only a spec, if its blocks are those below.

    llmc spec MODEL -o model.toml              write the spec that llmc derives
    llmc spec MODEL --check model.toml         say whether a spec accounts for every weight of the model
    llmc compile MODEL --spec model.toml ...   compile with it

An unknown key, a value out of bounds or settings that do not hold together are refused, all of them in one line; so
is a spec that leaves a tensor of the files unread or wants one that is not there. This page is written by
docs/make_spec_page.py.
"""

# The sizes that shapes are made of, as the page calls them.
SIZES = {
    "vocab": "sizes.vocab",
    "hidden": "sizes.hidden",
    "embedding": "embedding.width, or sizes.hidden where that is 0",
    "context": "sizes.context",
    "ffn": "sizes.ffn",
    "encoder_ffn": "encoder.ffn",
    "heads": "attention.heads",
    "buckets": "position.buckets",
    "q": "attention.heads times head_dim",
    "kv": "attention.kv_heads times head_dim",
    "mixed": "attention.heads times latent.value_dim where attention.kind is mla, else q",
    "q_rank": "latent.q_rank",
    "q_source": "latent.q_rank, or hidden where that is 0",
    "kv_rank": "latent.kv_rank",
    "plain": "latent.plain_dim",
    "rope": "latent.rope_dim",
    "heads_plain": "attention.heads times latent.plain_dim",
    "heads_rope": "attention.heads times latent.rope_dim",
    "heads_rank": "attention.heads times latent.kv_rank",
    "q_norm": "head_dim where attention.qk_norm is head, else q",
    "k_norm": "head_dim where attention.qk_norm is head, else kv",
    "gates": "q where attention.gate is each, else heads",
    "one": "1",
    "experts": "experts.count",
    "expert_ffn": "experts.ffn",
    "experts_ffn": "experts.count times experts.ffn",
    "experts_hidden": "experts.count times hidden",
    "shared_ffn": "experts.shared_ffn",
    "conv": "convolution.size",
    "conv_in": "3 times hidden",
}

KINDS: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "whole number",
    float: "number",
    int | None: "whole number",
    tuple[int, ...]: "list of whole numbers",
    tuple[float, ...]: "list of numbers",
}

SOURCES = """\
## [tensors]

Our names, on the left, are those of the table below: exactly the ones that the spec's settings ask for.
"""

FUSED = """\
For example, GPT-2's attention, one matrix with the inputs in its rows and one bias, and OPT's positions:

    "layers.{layer}.q" = "h.{layer}.attn.c_attn.weight | transposed | q k v"
    "layers.{layer}.k" = "h.{layer}.attn.c_attn.weight | transposed | q k v"
    "layers.{layer}.v" = "h.{layer}.attn.c_attn.weight | transposed | q k v"
    "layers.{layer}.q_bias" = "h.{layer}.attn.c_attn.bias | q k v"
    "layers.{layer}.k_bias" = "h.{layer}.attn.c_attn.bias | q k v"
    "layers.{layer}.v_bias" = "h.{layer}.attn.c_attn.bias | q k v"
    "positions" = "model.decoder.embed_positions.weight | skip 2"
"""


def page() -> str:
    """The whole of docs/spec.md."""
    hints = typing.get_type_hints(ModelSpec, vars(spec))
    fields = {field.name: field for field in dataclasses.fields(ModelSpec)}
    sections = [OPENING, f"`name`: 1 to {spec.NAME_LIMIT} characters.\n"]
    for name in sorted(fields, key=lambda name: _required(fields[name]), reverse=True):
        if kinds := [kind for kind in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(kind)]:
            sections.append(_block(name, kinds[0], _required(fields[name])))
    sections += [SOURCES, _doc(spec_sources), FUSED, _tensors(), _example()]
    return "\n".join(sections)


def _required(field: Any) -> bool:
    return bool(field.default is dataclasses.MISSING)


def _doc(thing: Any) -> str:
    return (inspect.getdoc(thing) or "") + "\n"


def _block(name: str, kind: Any, required: bool) -> str:
    """The section of one table of the file."""
    hints = typing.get_type_hints(kind, vars(spec))
    heading = f"## [{name}]" + ("" if required else " (may be left out)")
    rows = ["| key | value | if left out |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        optional = hints[field.name] == (int | None)
        default = "none" if optional else "must be given" if _required(field) else f"`{_toml(field.default)}`"
        rows.append(f"| `{field.name}` | {_values(f'{name}.{field.name}', hints[field.name])} | {default} |")
    return "\n".join([heading, "", _doc(kind), *rows, ""])


def _values(path: str, hint: Any) -> str:
    """What a key may be, in words."""
    if path in CHOICES:
        return ", ".join(f"`{choice}`" for choice in CHOICES[path])
    if path not in LIMITS:
        return KINDS[hint]
    low, high = map(_number, LIMITS[path])
    return f"{KINDS[hint]}, {low} to {high}{', or 0' if path in SWITCHES else ''}"


def _number(value: float) -> str:
    """A bound; powers of two from a thousand on as such."""
    if isinstance(value, int) and value > 1000 and value.bit_count() == 1:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


def _tensors() -> str:
    """The table of our names."""
    used = {letter for letters, _ in TABLE.values() for letter in letters}
    assert used == set(SIZES), f"say what {used ^ set(SIZES)} stands for"
    rows = ["| our name | shape | in a model where |", "|---|---|---|"]
    for name, (letters, wanted) in TABLE.items():
        words = condition_words(wanted) + _layers(name)
        rows.append(f"| `{name}` | {' x '.join(letters)} | {words} |")
    sizes = "; ".join(f"{letter}: {meaning}" for letter, meaning in SIZES.items() if meaning != f"sizes.{letter}")
    text = f"Matrices are (out, in). vocab, hidden, context and ffn are those of [sizes]; {sizes}."
    return "\n".join([textwrap.fill(text, 120), "", *rows, ""])


def _layers(name: str) -> str:
    """In which layers a tensor is."""
    if name.startswith("encoder.") or ".cross_" in name:
        return "; with `[encoder]`"
    if name in EXPERTS:
        return "; in `experts.layers`"
    if name in CONVOLUTION:
        return "; in `convolution.layers`"
    if name in ATTENTION:
        return "; not in `convolution.layers`"
    return "; not in `experts.layers`" if name in PLAIN_MLP else ""


class _UnansweredError(Exception):
    """A condition asked for a setting, its only argument, that has no value yet."""


class _Settings:
    """Stands for the blocks of a spec that has only the settings `given`: path -> value."""

    def __init__(self, given: dict[str, Any], block: str = "") -> None:
        self._given, self._block = given, block

    def __getattr__(self, name: str) -> Any:
        if not self._block:
            return _Settings(self._given, name)
        path = f"{self._block}.{name}"
        if path not in self._given:
            raise _UnansweredError(path)
        return self._given[path]


def _answers(path: str) -> tuple[Any, ...]:
    if path in SWITCHES:
        return (0, 1)
    return CHOICES.get(path, (False, True))


def _cases(wanted: Callable[[Any], bool], given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every way to set what the condition asks for, so that it holds."""
    try:
        if wanted(_Settings(given)):
            yield given
    except _UnansweredError as asked:
        path = str(asked)
        for value in _answers(path):
            yield from _cases(wanted, {**given, path: value})


def condition_words(wanted: Callable[[Any], bool]) -> str:
    """When a condition of TABLE holds, found by trying all settings it asks for.

    Raises ValueError for one that is more than an `and` of single settings.
    """
    cases = list(_cases(wanted, {}))
    if cases == [{}]:
        return "always"
    allowed = {path: [v for v in _answers(path) if any(case.get(path) == v for case in cases)] for path in cases[0]}
    count = 1
    for values in allowed.values():
        count *= len(values)
    if count != len(cases) or any(set(case) != set(allowed) for case in cases):
        raise ValueError(f"{cases}: no single `and`; say it in words")
    return ", ".join(_setting(path, values) for path, values in allowed.items())


def _setting(path: str, values: list[Any]) -> str:
    rest = [value for value in _answers(path) if value not in values]
    if path in SWITCHES:
        return f"`{path}` is {'not ' * (values == [1])}0"
    if len(rest) == 1 and len(values) > 1:
        return f"`{path}` is not {_toml(rest[0])}"
    return f"`{path}` is {' or '.join(_toml(value) for value in values)}"


def _example() -> str:
    return "\n".join(["## A whole spec", "", "```toml", to_toml(example()).rstrip(), "```", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
