"""Random inputs for the ops of attention, as kernel_cases.py has them for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from kernel_cases import TOLERANCE, Case, Rng, floats

from llmc.compiler.formats import to_bf16
from llmc.compiler.kv_pages import KINDS, page_shape
from llmc.compiler.meaning.convolution import KINDS as CONVOLVED
from llmc.compiler.ops import OPS


@dataclass(frozen=True)
class _Sequences:
    """Some sequences' pages: of each `past` slots written before this step and `new` ones of this step's rows."""

    past: list[int]
    new: list[int]
    ids: np.ndarray  # of all pages, in order
    indptr: np.ndarray

    @staticmethod
    def make(rng: Rng, lengths: list[tuple[int, int]]) -> _Sequences:
        """Pages anywhere in a pool that has two more."""
        past, new = (list(part) for part in zip(*lengths, strict=True))
        pages = [-(-sum(pair) // 16) for pair in lengths]
        ids = rng.permutation(sum(pages) + 2)[: sum(pages)].astype(np.int32)
        return _Sequences(past, new, ids, np.cumsum([0, *pages]).astype(np.int32))

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """seqs and slots of this step's rows."""
        pairs = [(s, slot) for s, past in enumerate(self.past) for slot in range(past, past + self.new[s])]
        seqs, slots = np.array(pairs, np.int32).T.copy()
        return seqs, slots

    def holes(self, rng: Rng) -> np.ndarray:
        """(S, 2): slots before this step's that no row sees, of some sequences: to the end of a page, or further."""
        found = np.zeros((len(self.past), 2), np.int32)
        for hole, past in zip(found, self.past, strict=True):
            first = int(rng.integers(0, past + 1))
            whole = -(-first // 16) * 16
            if whole <= past and rng.integers(0, 4):
                hole[:] = first, rng.integers(whole, past + 1)
        return found

    def pool(self, rng: Rng, kind: str, groups: int, size: int) -> np.ndarray:
        """Pages in which only past slots were written: the rest are NaN, or of float32 any numbers."""
        shape = (len(self.ids) + 2, *page_shape(kind, groups, size))
        never = {"bf16": 0x7FC0, "q8": 0xFF, "q4": 0xFF}
        kv = floats(rng, *shape) if kind == "f32" else np.full(shape, never[kind], KINDS[kind].dtype)
        for s, past in enumerate(self.past):
            for slot in range(past):
                page = self.ids[self.indptr[s] + slot // 16]
                KINDS[kind].store(kv, page, slot % 16, *floats(rng, 2, groups, size))
        return kv


def _sizes(rng: Rng) -> dict[str, Any]:
    """Heads of a size, one to a kv head or some."""
    groups, per_group, size = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3])), int(rng.choice(SIZES))
    return {"heads": groups * per_group, "kv_heads": groups, "head_dim": size, "scale": size**-0.5}


SIZES = (7, 10, 16, 20, 64, 80)
# Over bf16 pages weights are rounded: each is wrong by 1/512 of itself at most, their sum is exact.
ROUNDED = {"bf16": 2**-8}
# On tensor cores what is no bfloat16 is two: scores and sums of values are off by 3 * 2^-18 of their products' sizes,
# which add up to a few times the greatest one.
PARTED = 2**-15


def attention(
    rng: Rng, kind: str = "", op: str = "attention", lengths: list[tuple[int, int]] | None = None, **attrs: Any
) -> Case:
    """Several sequences: each with some tokens already in its pages and some rows of this step."""
    if lengths is None:
        lengths = [(int(rng.integers(0, 40)), int(rng.integers(1, 25))) for _ in range(int(rng.integers(1, 4)))]
    kind = kind or str(rng.choice(list(KINDS)))
    attrs = {
        **_sizes(rng),
        "window": int(rng.choice([0, 0, 1, 5, 16, 17, 33])),
        "kv_dtype": kind,
        "soft_cap": float(rng.choice([0, 0, 0.5, 5, 50])),
        "bias": str(rng.choice(["none", "alibi", "scaled_alibi"])),
        "causal": int(rng.choice([1, 1, 0])),
        **attrs,
    }
    attrs = {name: attrs[name] for name in OPS[op].attrs}
    heads, groups, size = attrs["heads"], attrs["kv_heads"], attrs["head_dim"]
    sequences = _Sequences.make(rng, lengths)
    seqs, slots = sequences.rows()
    qkv = floats(rng, len(seqs), (heads + 2 * groups) * size)
    pool, holes = sequences.pool(rng, kind, groups, size), sequences.holes(rng)
    arrays = [qkv, pool, seqs, slots, holes, sequences.indptr, sequences.ids]
    if op == "attention_with_sinks":  # some that outweigh every token, some that weigh next to nothing
        arrays.append(floats(rng, heads) * np.float32(rng.choice([1, 5, 100])))
    if op == "attention_by_distance":  # also distances that end inside a page, and far from where tokens are
        arrays.append(floats(rng, heads, 2 * int(rng.choice([1, 7, 16, 100])) + 1))
    return Case(op, arrays, attrs, (0, 1, 2, 3, 4, 5, 6), ROUNDED.get(kind, TOLERANCE))


def on_tensor_cores(case: Case) -> Case:
    """The case as near as CUDA kernels come to it (targets/cuda/attending.py): over bfloat16 as near as CPUs' do."""
    return case if case.attrs.get("kv_dtype") == "bf16" else replace(case, tolerance=PARTED)


def cross_attention(rng: Rng, kind: str = "") -> Case:
    """Sources of any lengths, some of them the same pages, and rows of sequences in any order."""
    kind = kind or str(rng.choice(list(KINDS)))
    attrs = {**_sizes(rng), "kv_dtype": kind}
    sources = _Sequences.make(rng, [(int(n), 0) for n in rng.choice([1, 15, 16, 17, 40], int(rng.integers(1, 4)))])
    kv = sources.pool(rng, kind, attrs["kv_heads"], attrs["head_dim"])
    seqs = rng.integers(0, len(sources.past), int(rng.choice([1, 3, 17]))).astype(np.int32)
    q = floats(rng, len(seqs), attrs["heads"] * attrs["head_dim"])
    arrays = [q, kv, seqs, np.array(sources.past, np.int32), sources.indptr, sources.ids]
    return Case("cross_attention", arrays, attrs, (0, 1, 2, 3, 4, 5), ROUNDED.get(kind, TOLERANCE))


def store_kv(rng: Rng, kind: str = "") -> Case:
    """Rows of several sequences over pages that hold something already."""
    case = attention(rng, kind)
    rows, kv, seqs, slots, _, indptr, ids = case.arrays
    attrs = {name: case.attrs[name] for name in OPS["store_kv"].attrs}
    width = 2 * attrs["kv_heads"] * attrs["head_dim"]
    return Case("store_kv", [rows[:, -width:].copy(), kv, seqs, slots, indptr, ids], attrs, (0, 1, 2, 3, 4, 5))


def turning(rng: Rng, kind: str = "", op: str = "load_keys", size: int = 0) -> Case:
    """Some pages, each to itself or to one that is not read."""
    kind, size, groups = kind or str(rng.choice(list(KINDS))), size or int(rng.choice(SIZES)), int(rng.integers(1, 4))
    sequences = _Sequences.make(rng, [(16 * int(rng.integers(1, 5)), 0)])
    kv = sequences.pool(rng, kind, groups, size)
    count = len(sequences.ids)
    spare = np.setdiff1d(np.arange(len(kv)), sequences.ids)[: int(rng.integers(0, 3))]
    to_ids = np.concatenate([spare, sequences.ids[len(spare) :]])[:count].astype(np.int32)
    sizes = {"kv_heads": groups, "head_dim": size, "kv_dtype": kind}
    if op == "load_keys":
        return Case(op, [kv, sequences.ids], sizes, (0, 1))
    if op == "copy_pages":
        return Case(op, [kv, sequences.ids, to_ids], {"kv_dtype": kind}, (0, 1, 2))
    return Case(op, [floats(rng, 16 * count, groups * size), kv, sequences.ids, to_ids], sizes, (0, 1, 2, 3))


def short_convolution(rng: Rng, kind: str = "", channels: int = 0) -> Case:
    """Rows of some sequences, over pages that keep all channels of the layer or some, from some on."""
    kind = kind if kind in CONVOLVED else str(rng.choice(list(CONVOLVED)))
    groups, size = int(rng.integers(1, 4)), int(rng.choice([16, 32, 48]))
    lengths = [(int(rng.integers(0, 40)), int(rng.integers(1, 25))) for _ in range(int(rng.integers(1, 4)))]
    sequences = _Sequences.make(rng, lengths)
    seqs, slots = sequences.rows()
    first = 16 * int(rng.integers(0, 4))
    channels = channels or 16 * int(rng.integers(1, 2 * groups * size // 16 + 2))
    shape = (len(sequences.ids) + 2, *page_shape(kind, groups, size))
    kv = floats(rng, *shape) if kind == "f32" else to_bf16(floats(rng, *shape))
    bcx = floats(rng, len(seqs), 3 * (first + channels))
    taps = floats(rng, int(rng.choice([2, 3, 4, 20])), first + channels)
    arrays = [bcx, taps, kv, seqs, slots, sequences.indptr, sequences.ids]
    return Case("short_convolution", arrays, {"first": first, "kv_dtype": kind}, (0, 2, 3, 4, 5, 6))


def rope_attention(rng: Rng, kind: str = "") -> Case:
    """Some numbers of each head of queries and keys are turned, or all of an even size."""
    case = attention(rng, kind)
    qkv, *pages = case.arrays
    table = floats(rng, len(qkv), 2 * int(rng.integers(1, case.attrs["head_dim"] // 2 + 1)))
    attrs = {**case.attrs, "layout": str(rng.choice(["half", "interleaved"]))}
    return replace(case, op="rope_attention", arrays=[qkv, table, *pages], attrs=attrs, symbolic=tuple(range(8)))


ATTENTION_CASES: dict[str, Callable[..., Case]] = {
    **{name: partial(attention, op=name) for name in ("attention", "attention_with_sinks", "attention_by_distance")},
    "cross_attention": cross_attention,
    "store_kv": store_kv,
    "short_convolution": short_convolution,
    **{name: partial(turning, op=name) for name in ("load_keys", "store_keys", "copy_pages")},
}
# Of kernels that CPUs have none of.
DEVICE_CASES: dict[str, Callable[..., Case]] = {"rope_attention": rope_attention}
