"""Knobs by kernel: what `llmc tune` has found, looked up while a module is lowered.

A kernel is an op, its weight format and its other attributes, and its shapes; a machine is an architecture and the CPU
flags that its code uses. Both are spelled as text, which is what a database has as keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from llmc.compiler.ops.quantized import LINEAR
from llmc.targets.knobs import Knobs
from llmc.targets.target import Target

Found = Mapping[str, int]  # knob -> value, of those that are not the target's own

_SHIPPED = Path(__file__).with_name("tuned_defaults.json")


def target_key(target: Target) -> str:
    """The architecture and the flags of a target's code.

    >>> target_key(Target("cpu-fma", "x86_64", ("fma", "avx")))
    'x86_64 avx fma'
    """
    return " ".join([target.arch, *sorted(target.requires)])


def kernel_key(name: str, shapes: Sequence[Sequence[Any]], attrs: Mapping[str, Any]) -> str:
    """Op, attributes and shapes of operands and outputs; a size that only the step knows is a letter.

    >>> kernel_key("i8_linear", [[96, 1368]], {"width": 1536, "format": "q4"})
    'i8_linear format=q4 width=1536: 96,1368'
    """
    from tvm import tirx  # late: a refusal of `llmc compile` needs no compiler

    letters: dict[str, str] = {}

    def size(value: Any) -> str:
        if isinstance(value, (int, tirx.IntImm)):
            return str(int(value))
        return letters.setdefault(str(value), f"m{len(letters) or ''}")

    said = [name, *(f"{key}={value}" for key, value in sorted(attrs.items()))]
    return f"{' '.join(said)}: {' '.join(','.join(map(size, shape)) for shape in shapes)}"


def family_key(name: str, attrs: Mapping[str, Any]) -> str:
    """Op and format of a kernel, whatever its shapes: what the shipped defaults go by.

    A linear layer with its activation is of the family of those without, and so are experts' matrices.

    >>> family_key("i8_linear_gated_i8", {"width": 1536, "format": "q4", "activation": "silu"})
    'i8_linear q4'
    """
    name = LINEAR if name.startswith((f"{LINEAR}_", "i8_experts_")) else name
    return f"{name} {attrs['format']}" if "format" in attrs else name


_WIDE_WORDS = 1024  # of a row of the first operand: 4,096 columns of int8


@dataclass(frozen=True)
class Tuned:
    """What is known of one target's kernels: `exact` by kernel, `families` for others, and `every` for all.

    `wide`: the same of those that read rows of many columns, over what is known of all.
    """

    exact: Mapping[str, Found] = field(default_factory=dict)
    families: Mapping[str, Found] = field(default_factory=dict)
    every: Found = field(default_factory=dict)
    wide: Tuned | None = None

    def knobs(self, default: Knobs, name: str, shapes: Sequence[Sequence[Any]], attrs: Mapping[str, Any]) -> Knobs:
        """The kernel's own knobs, or those of its family, over those of every kernel, over the target's."""
        wide = self.wide if self.wide is not None and _is_wide(shapes) else Tuned()
        found = self.exact.get(kernel_key(name, shapes, attrs))
        if found is None:
            family = family_key(name, attrs)
            found = {**self.families.get(family, {}), **wide.families.get(family, {})}
        return replace(default, **{**self.every, **wide.every, **found})


def _is_wide(shapes: Sequence[Sequence[Any]]) -> bool:
    """Whether the first operand has rows of many words."""
    return bool(shapes) and len(shapes[0]) > 1 and _number(shapes[0][1]) >= _WIDE_WORDS


def _number(size: Any) -> int:
    """A size, 0 where only the step knows it."""
    from tvm import tirx

    return int(size) if isinstance(size, (int, tirx.IntImm)) else 0


def shipped(target: Target) -> Tuned:
    """What this package knows of the CPUs that are most like the target: of those that lack nothing it has, the best.

    A machine with every flag of an entry runs the same kernels, perhaps others besides, so the entry with the most
    flags counts. A target without flags has none.
    """
    flags = set(target.requires)
    fitting = [entry for entry in _entries() if entry["arch"] == target.arch and flags >= set(entry["requires"])]
    best = max(fitting, key=lambda entry: len(entry["requires"]), default=None)
    if best is None:
        return Tuned()
    wide = best.get("wide")
    return Tuned(
        families=best["families"],
        every=best.get("every", {}),
        wide=None if wide is None else Tuned(families=wide["families"], every=wide.get("every", {})),
    )


@cache
def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(_SHIPPED.read_text(encoding="utf-8"))
    return entries
