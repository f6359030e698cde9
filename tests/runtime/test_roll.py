"""What a launcher makes of its workers' connections, and of what mpirun writes; no MPI here."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from llmc.runtime.workers import member
from llmc.runtime.workers.pass_on import Cut
from llmc.runtime.workers.roll import Roll

BANNER = b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 8\n"


class _Launch:
    """A roll of three workers that are played here."""

    def __init__(self) -> None:
        self.ready = selectors.DefaultSelector()
        self.roll = Roll(["cpu:0", "cpu:1", "cpu:2"], self.ready)
        self.ways: dict[int, socket.socket] = {}
        for rank in range(3):
            self.ways[rank] = self.connect(token=self.roll.token, rank=rank)

    def connect(self, **message: Any) -> socket.socket:
        host, port, _ = self.roll.environment[member.ADDRESS].split(":")
        way = socket.create_connection((host, int(port)))
        self.tell(way, **message)
        return way

    def tell(self, way: socket.socket, **message: Any) -> None:
        way.sendall(json.dumps(message).encode() + b"\n")
        self.listen()

    def end(self, rank: int) -> None:
        self.ways[rank].close()
        self.listen()

    def listen(self) -> None:
        while found := self.ready.select(0.05):
            for key, _ in found:
                key.data()

    def close(self) -> None:
        self.roll.close()
        for way in self.ways.values():
            way.close()
        self.ready.close()


@pytest.fixture
def launch() -> Iterator[_Launch]:
    played = _Launch()
    yield played
    played.close()


def test_all_is_well(launch: _Launch) -> None:
    for rank in (1, 0, 2):
        launch.tell(launch.ways[rank], done=0)
        launch.end(rank)
    launch.roll.finish(0)
    assert (launch.roll.error, launch.roll.code, launch.roll.connected) == (None, 0, False)


def test_the_first_that_ends_is_named(launch: _Launch) -> None:
    for rank in (1, 0, 2):
        launch.end(rank)
    launch.roll.finish(9)
    assert launch.roll.code == 1
    assert launch.roll.error == ("worker 1 (device cpu:1) ended: it was killed, or crashed; start all of them again")


def test_a_reason_is_said_and_what_follows_is_not(launch: _Launch) -> None:
    launch.tell(launch.ways[2], line="weights: damaged", code=1)
    launch.tell(launch.ways[0], line="worker 2 ended", code=1)
    launch.end(1)
    assert (launch.roll.error, launch.roll.code) == ("worker 2 (device cpu:2): weights: damaged", 1)


def test_the_front_speaks_for_the_command(launch: _Launch) -> None:
    launch.tell(launch.ways[0], line="No such option.", code=2)
    launch.end(1)
    assert (launch.roll.error, launch.roll.code) == ("No such option.", 2)


def test_who_ends_because_of_another_is_not_named(launch: _Launch) -> None:
    for rank in (1, 2):
        launch.tell(launch.ways[rank], lost=0)
        launch.end(rank)
    assert launch.roll.failed
    assert launch.roll.error is None
    launch.end(0)
    assert (launch.roll.error or "").startswith("worker 0 (device cpu:0) ended")


def test_who_ends_without_a_word_before_the_one_that_is_blamed_is_named(launch: _Launch) -> None:
    """mpirun kills rank 0 because of rank 2, and rank 1 hears of that first."""
    launch.tell(launch.ways[1], lost=0)
    launch.end(2)
    launch.end(0)
    launch.end(1)
    assert (launch.roll.error or "").startswith("worker 2 (device cpu:2) ended")


def test_the_reason_of_who_is_blamed_comes_first(launch: _Launch) -> None:
    launch.tell(launch.ways[2], lost=0)
    launch.end(2)
    launch.tell(launch.ways[0], line="the step failed", code=1)
    launch.end(0)
    assert launch.roll.error == "the step failed"


def test_a_signal_is_named(launch: _Launch) -> None:
    launch.tell(launch.ways[2], done=143)
    assert (launch.roll.error or "").startswith("worker 2 (device cpu:2) ended: signal 15")


def test_strangers_count_for_nothing(launch: _Launch) -> None:
    with launch.connect(token="0" * 32, rank=1) as stranger:
        assert stranger.recv(1) == b""
    with launch.connect(nothing=1), launch.connect(line="x", code=1):
        launch.listen()
    noise = launch.connect(token=3)
    with noise:
        assert noise.recv(1) == b""
    assert not launch.roll.failed


def test_what_mpirun_ended_with_counts(launch: _Launch) -> None:
    for rank in range(3):
        launch.tell(launch.ways[rank], done=0)
        launch.end(rank)
    launch.roll.finish(11)
    assert launch.roll.error == "mpirun ended with exit code 11 once all workers were done"
    assert not launch.roll.explained


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_answer_passes_whole_and_the_banner_does_not(size: int) -> None:
    answer = b'{"a": "====="}\n' + b"=" * 90 + b"\n=   BAD\n==\n"
    cut, passed = Cut(), b""
    said = answer + b"\n" + BANNER
    for start in range(0, len(said), size):
        passed += cut.of(said[start : start + size])
    assert passed + cut.rest() in (answer, answer + b"\n")
    assert cut.withheld == BANNER


def test_a_line_is_not_held_back() -> None:
    cut = Cut()
    assert cut.of(b"an answer\n") == b"an answer\n"
    assert cut.of(b"a heading\n===") == b"a heading\n"
    assert cut.of(b"\n") == b"===\n"
    assert cut.of(b"x=") + cut.rest() == b"x="
