"""Devices in one process: collectives, and what happens to the others when one fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.compiler.errors import LlmcError
from llmc.compiler.meaning import collective
from llmc.compiler.together import together


def _of(rank: int, rows: int = 3, columns: int = 2) -> np.ndarray:
    return (np.arange(rows * columns).reshape(rows, columns) + 100 * rank).astype(np.float32)


def test_groups_add_and_gather_by_themselves() -> None:
    def run(rank: int) -> tuple[Any, Any]:
        group = rank // 2
        total = collective.all_reduce(_of(rank), group)
        return total, collective.all_gather(_of(rank, columns=1 + rank % 2), group, 3)

    found = together([[0, 1], [2, 3]], [lambda rank=rank: run(rank) for rank in range(4)])
    for rank, (total, whole) in enumerate(found):
        first = rank // 2 * 2
        np.testing.assert_array_equal(total, _of(first) + _of(first + 1))
        np.testing.assert_array_equal(whole, np.concatenate([_of(first, columns=1), _of(first + 1)], 1))


def test_sums_are_in_order_of_ranks() -> None:
    parts = [np.array([[value]], np.float32) for value in (1e8, -1e8, 1.0)]
    found = together([range(3)], [lambda x=x: collective.all_reduce(x, 0) for x in parts])
    assert [float(total[0, 0]) for total in found] == [1.0] * 3


def test_what_is_sent_arrives_in_order_and_may_be_overwritten() -> None:
    def sender() -> None:
        x = _of(0)
        for _ in range(3):
            collective.send(x, 1)
            collective.send(x, -1)  # to nobody
            x += 1

    def receiver() -> list[np.ndarray]:
        return [collective.recv(np.zeros(3), 0, 2) for _ in range(3)]

    _, found = together([[0], [1]], [sender, receiver])
    for number, x in enumerate(found):
        np.testing.assert_array_equal(x, _of(0) + number)


def test_one_that_fails_leaves_nobody_waiting() -> None:
    def fails() -> None:
        raise ZeroDivisionError("of rank 2")

    waits = [lambda: collective.all_reduce(_of(0), 0), lambda: collective.recv(np.zeros(3), 2, 2)]
    with pytest.raises(ZeroDivisionError, match="of rank 2"):
        together([[0, 2], [1]], [*waits, fails])


def test_faults_are_named() -> None:
    with pytest.raises(LlmcError, match="not alone"):
        collective.all_reduce(_of(0), 0)
    with pytest.raises(LlmcError, match="rank 1 in a collective of group 0"):
        together([[0], [1]], [lambda: None, lambda: collective.all_reduce(_of(0), 0)])
    with pytest.raises(LlmcError, match="sent what no other took"):
        together([[0], [1]], [lambda: collective.send(_of(0), 1), lambda: None])
    with pytest.raises(LlmcError, match=r"recv from rank 0: \(3, 2\), wanted \(4, 2\)"):
        together([[0], [1]], [lambda: collective.send(_of(0), 1), lambda: collective.recv(np.zeros(4), 0, 2)])
    with pytest.raises(LlmcError, match="3 columns of the devices together, wanted 4"):
        together([[0, 1]], [lambda c=c: collective.all_gather(_of(0, columns=c), 0, 4) for c in (1, 2)])
    with pytest.raises(LlmcError, match=r"groups \[\[0\]\] of 2 devices"):
        together([[0]], [lambda: None, lambda: None])


def test_ids_of_a_share() -> None:
    ids = np.array([[0, 3, 4], [7, 8, 2]], np.int32)
    assert collective.own_ids(ids, 3, 5).tolist() == [[-1, 0, 1], [4, -1, -1]]
    assert collective.take_columns(_of(0, 2, 4), 1, 2).tolist() == [[1, 2], [5, 6]]
