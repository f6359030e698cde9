"""The index arrays of a compiled step, for all its sequences at once: int32, each at a multiple of 64 bytes.

runner.py says what they are. A step of many sequences feeds most of them one token, so no array is filled by sequence.
A step of few rows is listed first and copied once: a kernel's weights leave nothing of Python in the CPU's caches, so
what counts there is how many different functions are called.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.cache.pages import Sequence, pages_for

I32 = NDArray[np.int32]

_ALIGN_INTS = 16  # 64 bytes
_PADS = [array("i", [0] * (-length % _ALIGN_INTS)) for length in range(_ALIGN_INTS)]
_FEW_ROWS = 8  # up to which lists are quicker
_BLOCK_INTS = 1 << 16  # of the memory that arrays are cut out of


def index_arrays(sequences: SequenceOf[Sequence], ids: SequenceOf[I32], wanted: SequenceOf[int]) -> list[I32]:
    """Arrays of a step that feeds `ids` to `sequences`, the last `wanted` rows of each having logits.

    The compiled step wants R >= 1, so row 0 stands in for none.
    """
    counts = [len(new) for new in ids]
    if sum(counts) <= _FEW_ROWS:
        return _few(sequences, ids, counts, wanted)
    before = [0, *accumulate(counts)]  # rows before each sequence, and all
    pages = [pages_for(sequence.length + count) for sequence, count in zip(sequences, counts, strict=True)]
    indptr = [0, *accumulate(pages)]
    rows, logits = before[-1], sum(wanted)
    listed = [indptr[-1]] * len(sequences[0].tables)
    arrays = aligned([rows, rows, rows, rows, 2 * len(counts), len(indptr), *listed, max(1, logits)])
    tokens, positions, seqs, slots, holes, page_indptr, *page_ids, logit_rows = arrays
    np.concatenate(ids, out=tokens)
    seqs[:] = np.repeat(np.arange(len(counts)), counts)
    row = np.arange(rows)
    slots[:] = row + np.array([s.length - first for s, first in zip(sequences, before, strict=False)])[seqs]
    positions[:] = row + np.array([s.position - first for s, first in zip(sequences, before, strict=False)])[seqs]
    holes[:] = [slot for sequence in sequences for slot in sequence.hole]
    page_indptr[:] = indptr
    for group, ids_of_group in enumerate(page_ids):
        joined = _joined([sequence.tables[group] for sequence in sequences], pages)
        np.maximum(joined, 0, out=ids_of_group)  # NO_PAGE is never read, but it has to be a page; so too in `_few`
    logit_rows[:] = [at for end, count in zip(before[1:], wanted, strict=True) for at in range(end - count, end)] or 0
    return [tokens, positions, seqs, slots, holes.reshape(-1, 2), page_indptr, *page_ids, logit_rows]


def source_arrays(sources: SequenceOf[Sequence]) -> list[I32]:
    """The three arrays of what each sequence answers to. A source that several sequences share is listed for each."""
    counts = [pages_for(source.length) for source in sources]
    arrays = aligned([len(sources), len(sources) + 1, sum(counts)])
    source_lengths, source_indptr, source_ids = arrays
    source_lengths[:] = [source.length for source in sources]
    source_indptr[:] = [0, *accumulate(counts)]
    source_ids[:] = _joined([source.pages for source in sources], counts)
    return arrays


def aligned(lengths: list[int]) -> list[I32]:
    """Uninitialised arrays of so many int32 each, or of as many float32 seen so, from multiples of 64 bytes on."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += -(-length // _ALIGN_INTS) * _ALIGN_INTS
    memory, first = _memory.take(at)
    return [memory[first + start : first + start + n] for start, n in zip(starts, lengths, strict=True)]


class _Memory(threading.local):
    """Memory for arrays, never given out twice; a block of it lives as long as one of its arrays."""

    block: I32 = np.empty(0, np.int32)
    used = 0

    def take(self, count: int) -> tuple[I32, int]:
        """A block with room for `count` int32, a multiple of 16, and where it begins, at a multiple of 64 bytes."""
        if count > len(self.block) - self.used:
            block = np.empty(max(count, _BLOCK_INTS) + _ALIGN_INTS, np.int32)
            shift = (-block.ctypes.data % (4 * _ALIGN_INTS)) // 4
            self.block, self.used = block[shift:], 0
        first = self.used
        self.used += count
        return self.block, first


_memory = _Memory()


def _few(
    sequences: SequenceOf[Sequence], ids: SequenceOf[I32], counts: list[int], wanted: SequenceOf[int]
) -> list[I32]:
    """`index_arrays`, row by row."""
    empty: list[list[int]] = [[] for _ in range(6)]
    tokens, positions, seqs, slots, holes, rows = empty
    indptr = [0]
    tables = [array("i") for _ in sequences[0].tables]
    for number, (sequence, new, count, want) in enumerate(zip(sequences, ids, counts, wanted, strict=True)):
        tokens += new.tolist()
        positions += range(sequence.position, sequence.position + count)
        seqs += [number] * count
        slots += range(sequence.length, sequence.length + count)
        holes += sequence.hole
        rows += range(len(tokens) - want, len(tokens))
        pages = pages_for(sequence.length + count)
        indptr.append(indptr[-1] + pages)
        for joined, table in zip(tables, sequence.tables, strict=True):
            joined += table[:pages]
    listed = [joined if min(joined) >= 0 else [max(page, 0) for page in joined] for joined in tables]
    numbers, places = array("i"), []
    for part in (tokens, positions, seqs, slots, holes, indptr, *listed, rows or [0]):
        places.append((len(numbers), len(part)))
        numbers.extend(part)
        numbers.extend(_PADS[len(part) % _ALIGN_INTS])
    memory, first = _memory.take(len(numbers))
    memory[first : first + len(numbers)] = numbers
    arrays = [memory[first + start : first + start + length] for start, length in places]
    arrays[4] = arrays[4].reshape(-1, 2)
    return arrays


def _joined(tables: SequenceOf[array[int]], counts: SequenceOf[int]) -> I32:
    """The first `counts` entries of each table, one after another."""
    parts = [table[:count].tobytes() for table, count in zip(tables, counts, strict=True)]
    return np.frombuffer(b"".join(parts), np.int32)
