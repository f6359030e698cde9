"""Matches the tensors in the files with those the spec asks for; every mismatch is told at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import ModelSpec, expand, tensor_shapes
from llmc.compiler.spec_fields import clip
from llmc.compiler.spec_tensors import is_norm
from llmc.frontends.tensor import READABLE, Tensor

SHOWN = 40  # groups of names in one error

_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,6}(?![0-9])")


def group_names(names: Iterable[str]) -> str:
    """Names for an error message; those that differ only in their first number are one item.

    >>> group_names(["layers.0.q", "layers.1.q", "layers.2.q", "head"])
    'layers.{0-2}.q, head'
    """
    numbers: dict[str, list[int]] = {}
    for name in names:
        found = _NUMBER.search(name)
        key = name if not found else f"{name[: found.start()]}\0{name[found.end() :]}"
        numbers.setdefault(key, [])
        if found:
            numbers[key].append(int(found.group()))
    items = [key.replace("\0", _ranges(found)) for key, found in numbers.items()]
    shown = [item if item.isprintable() and len(item) < 100 else clip(item) for item in items]
    rest = len(shown) - SHOWN
    return ", ".join(shown[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "{0-2,5}"; a single number is just itself."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


def bind(
    spec: ModelSpec,
    found: Mapping[str, Tensor],
    ignorable: Collection[str],
    notes: Mapping[str, str],
    where: str,
) -> dict[str, Tensor]:
    """Our expanded names ("layers.3.q") -> tensors of `found`, in model order.

    `ignorable` are names of the file that carry nothing a model needs; `notes` says more about some
    that are refused. Norms that the file stores less one (`norm.weight`) are read with it. Raises
    SourceError listing all missing, unread, misshapen and unreadable ones.
    """
    names = expand(spec)
    shapes = tensor_shapes(spec)
    known = set(names.values()) | set(ignorable)
    faults = []
    if missing := [theirs for theirs in names.values() if theirs not in found]:
        faults.append(f"missing {group_names(missing)}")
    if unread := [name for name in found if name not in known]:
        hints = "".join(f" ({note})" for name, note in notes.items() if name in unread)
        faults.append(f"not read by any block {group_names(unread)}{hints}")
    present = {ours: found[theirs] for ours, theirs in names.items() if theirs in found}
    wrong: dict[str, list[str]] = {}
    unreadable: dict[str, list[str]] = {}
    for ours, tensor in present.items():
        if tensor.shape != shapes[ours]:
            reason = f"{list(tensor.shape)}, wanted {list(shapes[ours])}"
            wrong.setdefault(reason, []).append(tensor.name)
        if not tensor.readable:
            unreadable.setdefault(tensor.stored, []).append(tensor.name)
    faults += [f"shape of {group_names(group)} is {reason}" for reason, group in wrong.items()]
    faults += [
        f"{group_names(group)} stored as {stored}, wanted one of {', '.join(READABLE)}"
        for stored, group in unreadable.items()
    ]
    if faults:
        raise SourceError(
            f"{where}: tensors do not fit the spec: {'; '.join(faults)}. "
            "Give a spec file that describes this model, or fetch the whole model again"
        )
    if spec.norm.weight == "plus_one":
        present = {ours: replace(tensor, plus=1.0) if is_norm(ours) else tensor for ours, tensor in present.items()}
    return present
