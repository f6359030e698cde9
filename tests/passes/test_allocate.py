"""The budget: never exceeded, and near the best of all combinations."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llmc.passes.quantize.allocate import Choice, allocate

CHOICE = st.builds(Choice, st.just("x"), st.integers(1, 50), st.floats(0, 10))
CHOICES = st.lists(st.lists(CHOICE, min_size=1, max_size=4), min_size=1, max_size=4)


@given(CHOICES, st.integers(0, 200))
def test_the_budget_holds_and_the_loss_is_within_one_upgrade_of_the_best(
    choices: list[list[Choice]], budget: int
) -> None:
    picked = allocate(choices, budget)
    fits = [each for each in itertools.product(*choices) if sum(c.bytes for c in each) <= budget]
    if picked is None:
        assert fits == []
        return
    assert sum(c.bytes for c in picked) <= budget
    assert all(choice in each for choice, each in zip(picked, choices, strict=True))
    best = min(sum(c.loss for c in each) for each in fits)
    # Greedy on the convex hull is at most one step of one matrix away from the optimum.
    largest_step = max(max(c.loss for c in each) - min(c.loss for c in each) for each in choices)
    assert sum(c.loss for c in picked) <= best + largest_step + 1e-9


def test_a_choice_that_is_larger_and_no_better_is_never_taken() -> None:
    small, worse = Choice("small", 10, 1.0), Choice("worse", 20, 1.5)
    assert allocate([[worse, small]], 100) == [small]


def test_bytes_go_where_they_save_most() -> None:
    heavy = [Choice("low", 10, 5.0), Choice("high", 20, 0.0)]
    light = [Choice("low", 10, 1.0), Choice("high", 20, 0.0)]
    picked = allocate([light, heavy], 30)
    assert picked is not None
    assert [c.name for c in picked] == ["low", "high"]
