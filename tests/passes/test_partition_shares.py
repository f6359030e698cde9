"""What each device takes of so many units: everything once, in order, near its share; heads with their keys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.passes.partition.shares import Cut, apportion

_SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 300), _SHARES)
def test_units_are_given_out_once_and_fairly(units: int, shares: list[int]) -> None:
    if units < len(shares):
        with pytest.raises(LlmcError, match=f"{len(shares)} devices cannot share {units} things"):
            apportion(units, shares, "things")
        return
    found = apportion(units, shares, "things")
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == units
    assert all(end > first for first, end in found)
    due = [units * share / sum(shares) for share in shares]
    if min(due) >= 1:
        assert all(abs(end - first - one) < 1 for (first, end), one in zip(found, due, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), _SHARES)
def test_heads_go_with_their_keys(kv_heads: int, per_kv: int, shares: list[int]) -> None:
    heads = kv_heads * per_kv
    if heads < len(shares):
        with pytest.raises(LlmcError, match="heads"):
            Cut(tuple(shares), 0).heads(heads, kv_heads)
        return
    before = 0
    for member in range(len(shares)):
        own = Cut(tuple(shares), member).heads(heads, kv_heads)
        assert own.first == before
        before = own.end
        assert own.count % len(own.kv) == 0
        group = own.count // len(own.kv)
        # As attention reads them: query i goes with kv head i // group of the device's own.
        assert [own.kv[i // group] for i in range(own.count)] == [(own.first + i) // per_kv for i in range(own.count)]
    assert before == heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "shares", "expected"),
    [
        (9, 3, (1, 1), [(0, 6, (0, 1)), (6, 9, (2,))]),  # whole groups, though they do not divide evenly
        (71, 1, (1, 1), [(0, 36, (0,)), (36, 71, (0,))]),  # one kv head for all: each device has it
        (8, 2, (1, 1, 1, 1), [(0, 2, (0,)), (2, 4, (0,)), (4, 6, (1,)), (6, 8, (1,))]),
        (12, 2, (1, 1, 1), [(0, 6, (0,)), (6, 9, (1,)), (9, 12, (1,))]),  # half a kv head's queries at least
        (12, 2, (1, 2, 1), [(0, 3, (0,)), (3, 9, (0, 1)), (9, 12, (1,))]),
        (16, 4, (3, 1), [(0, 12, (0, 1, 2)), (12, 16, (3,))]),
    ],
)
def test_heads_of_known_models(
    heads: int, kv_heads: int, shares: tuple[int, ...], expected: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    found = [Cut(shares, member).heads(heads, kv_heads) for member in range(len(shares))]
    assert [(own.first, own.end, own.kv) for own in found] == expected


def test_blocks_of_columns_stay_whole_while_there_are_enough() -> None:
    assert [Cut((1, 1), m).columns(1536) for m in (0, 1)] == [(0, 768), (768, 1536)]
    assert [Cut((1, 1, 1), m).columns(1536) for m in range(3)] == [(0, 512), (512, 1024), (1024, 1536)]
    assert [Cut((3, 1), m).columns(200) for m in (0, 1)] == [(0, 192), (192, 200)]
    assert [Cut((1, 1, 1), m).columns(100) for m in range(3)] == [(0, 64), (64, 96), (96, 100)]
