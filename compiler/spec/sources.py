"""Where a tensor of ours lies in the files: a value of the spec's `tensors`, `NAME` or `NAME | STEP | STEP`.

NAME is the file's, with `{layer}` where ours has it. Matrices of experts (`layers.{layer}.experts.gate`, `up`, `down`)
are one tensor of the file for each, NAME with `{expert}`, or one of all: (experts, out, in), or the same with experts
one under another. Norms of q and k may be one tensor for each head, NAME with `{head}`. The steps, each at most once
and in this order:

- `squeezed`: the file's tensor has dimensions of 1 that a matrix has not, as that of a convolution.
- `transposed`: the file's matrix is (in, out).
- `skip 2`: without the first 2 rows.
- `row 0 of 2`: ours is a vector, the first of the 2 rows of the file's matrix.
- `flat`: ours is a vector, the rows of the file's matrix one after another.
- `q k v` in the file's order, two or more of q, k, v, gate, up, or of q_plain, q_rope, kv_down, k_rope, k_up, v_up:
  its rows are those of these tensors of ours one after another, and each of ours takes its own. `q k v by group`:
  they lie so for every KV head, one KV head after another; `q k v by 4`: so in each of 4 equal pieces;
  `gate up by expert`: so for every expert; `gate up by row`: a row of each, one row after another.
- `turned by group`: of each KV head's rows, ours has the columns.
- `normalized`: every row is divided by its length, or by 1e-12 where it is shorter than that.

`skip` and parts are for biases too: there, `q` means `q_bias`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmc.compiler.errors import SpecError
from llmc.compiler.spec.fields import clip, near

PARTS = ("q", "k", "v", "gate", "up", "q_plain", "q_rope", "kv_down", "k_rope", "k_up", "v_up")
_HEADED = ("q", "k", "v", "q_plain", "q_rope", "k_up", "v_up")  # parts that have KV heads
_STEPS = (
    "squeezed, transposed, skip N, row N of M, flat, turned by group, normalized, or parts of a fused tensor like "
    "q k v, q k v by group, gate up by expert"
)

EXPERT = "{expert}"
HEAD = "{head}"
ENCODER = "encoder."  # what our names of an encoder's tensors begin with
_STACKED = "layers.{layer}.experts."  # what our names of matrices of experts begin with

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_OWN = re.compile(rf"(?P<prefix>(?:.*\.)?)(?P<part>{'|'.join(PARTS)})(?P<suffix>(?:_bias)?)")


@dataclass(frozen=True)
class Split:
    """Parts that lie one after another, in each of `pieces` equal pieces.

    None: as many as KV heads; 0: as many as experts; -1: as many as rows of each.
    """

    parts: tuple[str, ...]
    pieces: int | None = 1


@dataclass(frozen=True)
class Source:
    """A parsed value: the file's name, and what is read of that tensor, left to right."""

    name: str
    transposed: bool = False
    skip: int = 0  # rows
    row: tuple[int, int] | None = None  # (which, of how many)
    flat: bool = False
    split: Split | None = None
    turned: bool = False
    normalized: bool = False
    squeezed: bool = False


@dataclass(frozen=True)
class Layout:
    """Where rows lie: our row i is row start + stride * (i // run) + i % run of the file's tensor.

    `shape` is the file's, before it is transposed; rows are counted after.
    """

    shape: tuple[int, ...]
    start: int
    run: int
    stride: int


def parse(text: str) -> Source:
    """The source in a value of `tensors`. Raises SpecError saying what is wrong with it.

    >>> parse("h.{layer}.c_attn.weight | transposed | q k v").split
    Split(parts=('q', 'k', 'v'), pieces=1)
    """
    name, *steps = (piece.strip() for piece in text.split("|"))
    if not name:
        raise SpecError(f"{clip(text)}: no name of the file before the first |")
    source = Source(name)
    for step in steps:
        words = step.split()
        before = source
        if words == ["squeezed"]:
            source = replace(source, squeezed=True)
        elif words == ["transposed"]:
            source = replace(source, transposed=True)
        elif words[:1] == ["skip"]:
            source = replace(source, skip=_skipped(words, text))
        elif words[:1] == ["row"]:
            source = replace(source, row=_row(words, text))
        elif words == ["flat"]:
            source = replace(source, flat=True)
        elif words == ["turned", "by", "group"]:
            source = replace(source, turned=True)
        elif words == ["normalized"]:
            source = replace(source, normalized=True)
        else:
            source = replace(source, split=_split(words, text))
        if source == before or _rank(before) >= _rank(source):
            raise SpecError(
                f"{clip(text)}: wanted each step once, in this order: squeezed, transposed, skip, one of row, flat and "
                "parts, turned, normalized"
            )
    return source


def _rank(source: Source) -> int:
    """The place of the last step in the order that steps must have; 0 for none."""
    if source.normalized or source.turned:
        return 5 + source.normalized
    if source.split or source.row or source.flat:
        return 4
    return 3 if source.skip else 2 if source.transposed else int(source.squeezed)


def _skipped(words: list[str], text: str) -> int:
    if len(words) != 2 or not _NUMBER.fullmatch(words[1]):
        raise SpecError(f"{clip(text)}: wanted a number of rows, at least 1, after skip")
    return int(words[1])


def _row(words: list[str], text: str) -> tuple[int, int]:
    if len(words) == 4 and words[2] == "of" and all(re.fullmatch("[0-9]{1,9}", word) for word in words[1::2]):
        row, count = int(words[1]), int(words[3])
        if row < count:
            return row, count
    raise SpecError(f"{clip(text)}: wanted row N of M, N from 0 to M - 1")


def _split(words: list[str], text: str) -> Split:
    parts, by, count = tuple(words), "", ""
    if len(words) > 2 and words[-2] == "by":
        parts, by, count = tuple(words[:-2]), *words[-2:]
    if unknown := [part for part in parts if part not in PARTS] or ([] if parts else [""]):
        raise SpecError(f"{clip(text)}: unknown step or part {near(unknown[0], PARTS)}, wanted {_STEPS}")
    if len(parts) < 2 or len(set(parts)) != len(parts):
        raise SpecError(f"{clip(text)}: wanted at least two parts, each once, got {' '.join(parts)}")
    if not by:
        return Split(parts)
    if count == "group":
        if not set(parts) <= set(_HEADED):
            raise SpecError(f"{clip(text)}: by group is for {', '.join(_HEADED)}, got {' '.join(parts)}")
        return Split(parts, None)
    if count == "expert":
        if set(parts) & set(_HEADED):
            raise SpecError(f"{clip(text)}: by expert is for gate and up, got {' '.join(parts)}")
        return Split(parts, 0)
    if count == "row":
        return Split(parts, -1)
    if not _NUMBER.fullmatch(count):
        raise SpecError(f"{clip(text)}: wanted group, expert, row or a number after by, got {clip(count)}")
    return Split(parts, int(count))


def source_faults(tensors: Mapping[str, str]) -> list[str]:
    """What is wrong with a spec's `tensors`, our names with "{layer}" -> values, one by one and together."""
    faults = []
    readers: dict[str, list[tuple[str, Source]]] = {}
    for ours, text in tensors.items():
        if not text.isprintable():
            faults.append(f"tensors: {clip(ours)} = {clip(text)}, wanted printable characters")
            continue
        try:
            source = parse(text)
        except SpecError as error:
            faults.append(f"tensors: {clip(ours)} = {error}")
            continue
        if ours.count("{layer}") != source.name.count("{layer}"):
            faults.append(f"tensors: {clip(ours)} = {clip(text)}, wanted {{layer}} once on both sides or on neither")
        if EXPERT in source.name and (not ours.startswith(_STACKED) or source.name.count(EXPERT) > 1):
            faults.append(f"tensors: {clip(ours)} = {clip(text)}, wanted {{expert}} once, and only for {_STACKED}*")
        if HEAD in source.name and (not ours.endswith(("q_norm", "k_norm")) or source.name.count(HEAD) > 1):
            faults.append(f"tensors: {clip(ours)} = {clip(text)}, wanted {{head}} once, and only for q_norm and k_norm")
        if source.split and own_part(ours) not in source.split.parts:
            faults.append(f"tensors: {clip(ours)} = {clip(text)}, which has no part for {clip(ours)}")
        readers.setdefault(source.name, []).append((ours, source))
    for name, several in readers.items():
        split = several[0][1].split
        if not _can_share(several):
            faults.append(
                f"tensors gives one name of the file to several of ours: {clip(name)} to "
                f"{', '.join(clip(ours) for ours, _ in several)}; only parts of a fused tensor can share one, "
                "all with the same steps"
            )
        elif split and (unread := set(split.parts) - {own_part(ours) for ours, _ in several}):
            faults.append(f"tensors: nothing reads {', '.join(sorted(unread))} of {clip(name)}")
    return faults


def _can_share(readers: list[tuple[str, Source]]) -> bool:
    """Whether each reads a part of its own of a tensor that all take for the same."""
    if len(readers) == 1:
        return True
    siblings = {(_fields(ours)["prefix"], _fields(ours)["suffix"]) for ours, _ in readers}
    parts = [own_part(ours) for ours, _ in readers]
    views = {replace(source, turned=False) for _, source in readers}
    return len(views) == len(siblings) == 1 and readers[0][1].split is not None and len(set(parts)) == len(parts)


def _fields(ours: str) -> dict[str, str]:
    found = _OWN.fullmatch(ours)
    return found.groupdict() if found else {"prefix": ours, "part": "", "suffix": ""}


def own_part(ours: str) -> str:
    """The part that one of our names is, "" if it is none.

    >>> own_part("layers.3.k_bias"), own_part("layers.3.k_norm")
    ('k', '')
    """
    return _fields(ours)["part"]


def part_names(ours: str, source: Source) -> list[str]:
    """Our names of all parts of the tensor that `ours` is read from, in the file's order; [ours] if it is not fused.

    >>> part_names("layers.3.k_bias", parse("c_attn.bias | q k v"))
    ['layers.3.q_bias', 'layers.3.k_bias', 'layers.3.v_bias']
    """
    if source.split is None:
        return [ours]
    fields = _fields(ours)
    return [fields["prefix"] + part + fields["suffix"] for part in source.split.parts]


def expand_sources(tensors: Mapping[str, str], layers: int, encoder_layers: int = 0) -> dict[str, Source]:
    """Our expanded names ("layers.3.q") -> sources with the file's names of that layer."""
    sources = {}
    for ours, text in tensors.items():
        source = parse(text)
        count = encoder_layers if ours.startswith(ENCODER) else layers
        for layer in range(count) if "{layer}" in ours else [0]:
            name = source.name.replace("{layer}", str(layer))
            sources[ours.replace("{layer}", str(layer))] = replace(source, name=name)
    return sources


def before_turning(shape: tuple[int, ...], source: Source, kv_heads: int) -> tuple[int, ...]:
    """The shape that what is read has before a step turns it: (G N, K) for (G K, N), the same where none does.

    >>> before_turning((8, 3), parse("a | turned by group"), 2)
    (6, 4)
    """
    if not source.turned or len(shape) != 2 or shape[0] % kv_heads:
        return shape
    return kv_heads * shape[1], shape[0] // kv_heads


def layout(ours: str, source: Source, shapes: Mapping[str, tuple[int, ...]], kv_heads: int, experts: int = 0) -> Layout:
    """Where the rows of `ours` lie, and the shape the file's tensor must have.

    `shapes` are ours, by expanded name, all parts of a fused tensor among them. Raises SpecError when the source cannot
    be for these shapes. Experts count as rows one under another; what is read flat is a vector.
    """
    if source.normalized and len(shapes[ours]) == 1:
        raise SpecError("only rows of a matrix can be normalized")
    if source.turned and (len(shapes[ours]) != 2 or source.row or shapes[ours][0] % kv_heads):
        raise SpecError("only the rows of a matrix of KV heads can be turned by group")
    if source.row:
        return _row_layout(source, source.row, shapes[ours])
    rows, *rest = shapes[ours]
    if source.flat and rest:
        raise SpecError("only a vector can be flat")
    start = source.skip
    run = stride = whole = rows
    if source.split:
        names = part_names(ours, source)
        pieces = {None: kv_heads, 0: experts, -1: rows}.get(source.split.pieces, source.split.pieces) or 1
        counts = [shapes[name][0] for name in names]
        if uneven := [part for part, count in zip(source.split.parts, counts, strict=True) if count % pieces]:
            raise SpecError(f"the rows of {', '.join(uneven)} do not divide into {pieces} pieces")
        whole = sum(counts)
        run, stride = rows // pieces, whole // pieces
        start += sum(counts[: names.index(ours)]) // pieces
    stored = (source.skip + whole, *rest)
    if source.transposed and len(stored) != 2:
        raise SpecError("only a matrix can be transposed")
    return Layout(stored[::-1] if source.transposed else stored, start, run, stride)


def _row_layout(source: Source, row: tuple[int, int], shape: tuple[int, ...]) -> Layout:
    if len(shape) != 1 or source.skip:
        raise SpecError("only a vector can be one row, and of all rows")
    stored = (row[1], *shape)
    return Layout(stored[::-1] if source.transposed else stored, row[0], 1, 1)
