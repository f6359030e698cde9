"""Matches the tensors in the files with those the spec asks for; every mismatch is told at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher

from llmc.compiler.errors import SourceError, SpecError
from llmc.compiler.spec import ModelSpec, tensor_shapes
from llmc.compiler.spec.fields import clip
from llmc.compiler.spec.sources import (
    HEAD,
    Layout,
    Source,
    before_turning,
    expand_sources,
    layout,
    own_part,
    part_names,
)
from llmc.compiler.spec.tensors import encoder_layers, is_norm, is_stacked
from llmc.frontends.expert_tensors import gather, gather_vectors, names_of
from llmc.frontends.tensor import READABLE, Tensor
from llmc.frontends.tensor_view import flat, squeezed, view

SHOWN = 40  # groups of names in one error
PAIRED, PAIR_LENGTH = 20, 100  # groups and characters of them that are compared for near names
PAIR_RATIO = 0.7  # of letters two near names share

_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,6}(?![0-9])")


def group_names(names: Iterable[str]) -> str:
    """Names for an error message; those that differ only in their first number are one item.

    >>> group_names(["layers.0.q", "layers.1.q", "layers.2.q", "head"])
    'layers.{0-2}.q, head'
    """
    shown = [_shown(key, numbers) for key, numbers in _grouped(names).items()]
    rest = len(shown) - SHOWN
    return ", ".join(shown[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _grouped(names: Iterable[str]) -> dict[str, list[int]]:
    """Names with \\0 for their first number -> these numbers, none where there is no number."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        found = _NUMBER.search(name)
        key = name if not found else f"{name[: found.start()]}\0{name[found.end() :]}"
        numbers.setdefault(key, [])
        if found:
            numbers[key].append(int(found.group()))
    return numbers


def _shown(key: str, numbers: list[int]) -> str:
    item = key.replace("\0", _ranges(numbers))
    return item if item.isprintable() and len(item) < 100 else clip(item)


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


def near_names(missing: Iterable[str], unread: Iterable[str]) -> str:
    """Pairs of names that may be meant for one another, each name in one pair, the nearest first; "" for none.

    >>> near_names(["h.0.attn.q", "h.1.attn.q"], ["h.0.attention.q", "h.1.attention.q", "wpe"])
    'h.{0-1}.attn.q may be h.{0-1}.attention.q'
    """
    ours, theirs = ({key: _shown(key, found) for key, found in _grouped(names).items()} for names in (missing, unread))
    pairs = [
        (SequenceMatcher(None, a[:PAIR_LENGTH], b[:PAIR_LENGTH], autojunk=False).ratio(), a, b)
        for a in list(ours)[:PAIRED]
        for b in list(theirs)[:PAIRED]
    ]
    shown = []
    for ratio, a, b in sorted(pairs, key=lambda pair: -pair[0]):
        if ratio >= PAIR_RATIO and a in ours and b in theirs:
            shown.append(f"{ours.pop(a)} may be {theirs.pop(b)}")
    return ", ".join(shown)


def bind(
    spec: ModelSpec,
    found: Mapping[str, Tensor],
    ignorable: Collection[str],
    notes: Mapping[str, str],
    where: str,
) -> dict[str, Tensor]:
    """Our expanded names ("layers.3.q") -> tensors of `found` or views of them, in model order.

    `ignorable` are names of the file that carry nothing a model needs; `notes` says more about some
    that are refused. Norms that the file stores less one (`norm.weight`) are read with it. Raises
    SourceError listing all missing, unread, misshapen and unreadable ones.
    """
    shapes = tensor_shapes(spec)
    sources = expand_sources(spec.tensors, spec.sizes.layers, encoder_layers(spec))
    counts = {ours: _count(ours, spec) for ours in shapes}
    wanted = [name for ours in shapes for name in names_of(sources[ours], counts[ours])]
    present, expert_faults = _present(sources, counts, found)
    for ours, tensor in present.items():
        if tensor.turned:
            sources[ours] = replace(sources[ours], transposed=False)
    if spec.norm.weight == "plus_one":
        present = {ours: replace(tensor, plus=1.0) if is_norm(ours) else tensor for ours, tensor in present.items()}
    present = {ours: flat(tensor) if sources[ours].flat else tensor for ours, tensor in present.items()}
    present = {ours: squeezed(tensor) if sources[ours].squeezed else tensor for ours, tensor in present.items()}
    groups = spec.attention.kv_heads
    read = {ours: before_turning(shape, sources[ours], groups) for ours, shape in shapes.items()}
    places, shape_faults = _places(spec, sources, read, present)
    faults = [*_name_faults(wanted, found, ignorable, notes), *expert_faults, *shape_faults]
    unreadable: dict[str, dict[str, None]] = {}
    for tensor in present.values():
        if not tensor.readable:
            unreadable.setdefault(tensor.stored, {})[tensor.name] = None
    faults += [
        f"{group_names(group)} stored as {stored}, wanted one of {', '.join(READABLE)}"
        for stored, group in unreadable.items()
    ]
    if faults:
        raise SourceError(
            f"{where}: tensors do not fit the spec: {'; '.join(faults)}. "
            "Give a spec file that describes this model, or fetch the whole model again"
        )
    return {ours: view(tensor, sources[ours], shapes[ours], places[ours], groups) for ours, tensor in present.items()}


def _count(ours: str, spec: ModelSpec) -> int:
    """How many tensors of the file ours may be made of: of experts, or of heads."""
    heads = {"q_norm": spec.attention.heads, "k_norm": spec.attention.kv_heads}
    return heads.get(ours.rsplit(".", 1)[-1], spec.experts.count)


def _present(
    sources: dict[str, Source], counts: Mapping[str, int], found: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Our names -> the tensors they are read from, several as one; `sources` keeps the steps that are left."""
    present = {}
    unfit: dict[str, dict[str, None]] = {}  # what is wrong -> names of the file, each once
    for ours, count in counts.items():
        source = sources[ours]
        if is_stacked(ours) or HEAD in source.name:
            try:
                if HEAD in source.name or ours.endswith("_bias"):
                    tensor = gather_vectors(source, found, count)
                else:
                    tensor, sources[ours] = gather(source, found, count)
            except SpecError as error:
                unfit.setdefault(str(error), {})[source.name] = None
                continue
        else:
            tensor = found.get(source.name)
        if tensor is not None:
            present[ours] = tensor
    return present, [f"{group_names(names)} cannot be read: {reason}" for reason, names in unfit.items()]


def _name_faults(
    wanted: Iterable[str], found: Mapping[str, Tensor], ignorable: Collection[str], notes: Mapping[str, str]
) -> list[str]:
    """Names of the file that the spec wants and that are not there, and the other way round."""
    missing = dict.fromkeys(name for name in wanted if name not in found)
    known = {*wanted, *ignorable}
    unread = [name for name in found if name not in known]
    faults = []
    if missing:
        faults.append(f"missing {group_names(missing)}")
    if unread:
        hints = "".join(f" ({note})" for name, note in notes.items() if name in unread)
        faults.append(f"not read by any block {group_names(unread)}{hints}")
    if pairs := near_names(missing, unread):
        faults.append(pairs)
    return faults


def _places(
    spec: ModelSpec,
    sources: Mapping[str, Source],
    shapes: Mapping[str, tuple[int, ...]],
    present: Mapping[str, Tensor],
) -> tuple[dict[str, Layout], list[str]]:
    """Where each of ours lies in its tensor of the file, and what is wrong with the tensors' shapes."""
    places = {}
    unfit: dict[str, dict[str, None]] = {}  # what is wrong -> names of the file, each once
    misshapen: dict[str, dict[str, None]] = {}
    for ours, tensor in present.items():
        source = sources[ours]
        try:
            place = places[ours] = layout(ours, source, shapes, spec.attention.kv_heads, spec.experts.count)
        except SpecError as error:
            unfit.setdefault(str(error), {})[tensor.name] = None
            continue
        if tensor.shape != place.shape:
            why = f" ({_sum(source, ours, shapes)})" if source.split or source.skip else ""
            reason = f"{list(tensor.shape)}, wanted {list(place.shape)}{why}"
            misshapen.setdefault(reason, {})[tensor.name] = None
    return places, [
        *(f"{group_names(names)} cannot be read as the spec says: {reason}" for reason, names in unfit.items()),
        *(f"shape of {group_names(names)} is {reason}" for reason, names in misshapen.items()),
    ]


def _sum(source: Source, ours: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What the rows of a tensor of the file are, in words.

    >>> _sum(Source("wpe", skip=2), "positions", {"positions": (8, 4)})
    '2 rows to skip, 8 rows of positions'
    """
    words = [f"{source.skip} rows to skip"] if source.skip else []
    words += [f"{shapes[name][0]} rows of {own_part(name) or name}" for name in part_names(ours, source)]
    return ", ".join(words)
