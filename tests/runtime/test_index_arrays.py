"""Index arrays filled for all sequences at once, against lists filled row by row."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.cache.pages import Sequence
from llmc.runtime.index_arrays import index_arrays, source_arrays

# Slots taken, tokens that went before and are gone, tokens to feed, and how many of these want logits.
FEEDS = st.tuples(st.integers(0, 70), st.integers(0, 99), st.integers(1, 40), st.sampled_from(["none", "last", "all"]))


@given(feeds=st.lists(FEEDS, min_size=1, max_size=9), groups=st.integers(1, 2))
def test_each_row_has_its_place(feeds: list[tuple[int, int, int, str]], groups: int) -> None:
    sequences, ids, wanted = [], [], []
    tokens, positions, seqs, slots, indptr, logit_rows = [], [], [], [], [0], []
    pages: list[list[int]] = [[] for _ in range(groups)]
    for number, (length, gone, count, logits) in enumerate(feeds):
        sequence = Sequence(None, groups)
        sequence.length, sequence.position, sequence.hole = length, length + gone, (number, number + gone)
        new = [7 * number + n for n in range(count)]
        for row, token in enumerate(new):
            tokens.append(token)
            positions.append(length + gone + row)
            seqs.append(number)
            slots.append(length + row)
            if logits == "all" or (logits == "last" and row == count - 1):
                logit_rows.append(len(tokens) - 1)
        for group, table in enumerate(sequence.tables):  # more pages than the step needs, some of them given back
            table.extend(-1 if page % 3 == group else 100 * group + 10 * number + page for page in range(10))
        needed = -(-(length + count) // 16)
        for group, table in enumerate(sequence.tables):
            pages[group] += [max(0, page) for page in table[:needed]]
        indptr.append(indptr[-1] + needed)
        sequences.append(sequence)
        ids.append(np.array(new, np.int32))
        wanted.append({"none": 0, "last": 1, "all": count}[logits])
    arrays = index_arrays(sequences, ids, wanted)
    holes = [sequence.hole for sequence in sequences]
    for found, listed in zip(
        arrays, [tokens, positions, seqs, slots, holes, indptr, *pages, logit_rows or [0]], strict=True
    ):
        np.testing.assert_array_equal(found, listed)
        assert (found.dtype.name, found.ctypes.data % 64, found.flags.c_contiguous) == ("int32", 0, True)


def test_a_source_is_listed_for_each_that_answers_to_it() -> None:
    source, other = Sequence(), Sequence()
    source.length, other.length = 17, 16
    source.tables, other.tables = [array("i", [4, 2, 9])], [array("i", [7])]
    lengths, indptr, ids = source_arrays([source, other, source])
    assert (lengths.tolist(), indptr.tolist(), ids.tolist()) == ([17, 16, 17], [0, 2, 3, 5], [4, 2, 7, 4, 2])
