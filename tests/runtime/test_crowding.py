"""How many threads a call gets while other processes want the CPUs, told by a clock and a count of switches."""

from __future__ import annotations

from llmc.runtime.loading.crowding import Crowding


class Machine:
    """A clock, and switches as a neighbour that wants `taken` of the CPUs makes them."""

    def __init__(self, cpus: int) -> None:
        self.cpus, self.taken = cpus, 0
        self.time, self.worked, self.switches = 0.0, 0.0, 0.0
        self.crowding = Crowding(cpus, lambda: self.time, lambda: self.worked, lambda: int(self.switches))

    def call(self, seconds: float = 0.004) -> int:
        """Threads that one call ran on."""
        threads = self.crowding.begin()
        disturbed = threads > 1 and threads + self.taken > self.cpus
        self.switches += seconds * (8000 if disturbed else 150)
        self.worked += seconds * (threads - (0.6 if disturbed else 0.15))
        self.time += seconds
        self.crowding.end()
        self.time += 0.0005
        return threads

    def shares(self, seconds: float) -> dict[int, float]:
        """Numbers of threads -> the share of calls that ran on so many."""
        seen: list[int] = []
        end = self.time + seconds
        while self.time < end:
            seen.append(self.call())
        return {threads: seen.count(threads) / len(seen) for threads in sorted(set(seen))}


def test_alone_it_has_all_threads() -> None:
    assert Machine(4).shares(10) == {4: 1.0}


def test_a_neighbour_costs_a_thread_and_few_trials() -> None:
    machine = Machine(2)
    machine.taken = 1
    found = machine.shares(20)
    assert found[1] > 0.95
    assert found[2] > 0


def test_a_short_disturbance_costs_nothing() -> None:
    machine = Machine(2)
    seen = []
    for number in range(1000):
        machine.taken = int(number % 20 == 0)
        seen.append(machine.call())
    assert set(seen) == {2}


def test_two_neighbours_cost_two_threads() -> None:
    machine = Machine(4)
    machine.taken = 2
    machine.shares(5)
    assert machine.shares(20)[2] > 0.9


def test_when_the_neighbour_has_gone_the_thread_comes_back() -> None:
    machine = Machine(2)
    machine.taken = 1
    machine.shares(20)
    machine.taken = 0
    machine.shares(2.1)
    assert machine.shares(10) == {2: 1.0}


def test_long_calls_are_not_spent_on_trials() -> None:
    machine = Machine(2)
    machine.taken = 1
    seen = [machine.call(0.6) for _ in range(50)]
    assert seen.count(2) <= 50 / 8


def test_one_thread_is_never_taken_away_and_nothing_is_asked() -> None:
    crowding = Crowding(1, now=lambda: 1 / 0, worked=lambda: 1 / 0)
    assert [crowding.begin() for _ in range(3)] == [1, 1, 1]
    crowding.end()
