"""Device strings: what they mean, that they survive being written and read, and what is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import Device, Placement, parse_placement


@pytest.mark.parametrize(
    ("text", "stages", "kind"),
    [
        ("0", [["0"]], "whole"),
        ("0;1", [["0"], ["1"]], "layer"),
        ("0,1", [["0"], ["1"]], "layer"),
        ("0&1", [["0", "1"]], "tensor"),
        ("0|1", [["0", "1"]], "tensor"),
        (" 0 & 1 ; 2 & 3 ", [["0", "1"], ["2", "3"]], "hybrid"),
        ("3;0&2", [["3"], ["0", "2"]], "hybrid"),
        ("cpu;cuda:0", [["cpu:0"], ["cuda:0"]], "layer"),
        ("cpu:1&cuda&cuda:1", [["cpu:1", "cuda:0", "cuda:1"]], "tensor"),
    ],
)
def test_device_strings(text: str, stages: list[list[str]], kind: str) -> None:
    placement = parse_placement(text)
    assert [[str(device) for device in stage] for stage in placement.stages] == stages
    assert placement.kind == kind
    assert placement.shares == tuple((1,) * len(stage) for stage in stages)


@pytest.mark.parametrize(
    ("text", "split", "message"),
    [
        ("", None, "a place without a device"),
        ("0;;1", None, "a place without a device"),
        ("0&", None, "a place without a device"),
        ("gpu:0", None, "'gpu:0' is no device; wanted a number, cpu"),
        ("cuda:-1", None, "'cuda:-1' is no device"),
        ("0x1", None, "'0x1' is no device"),
        ("\u0661", None, "is no device"),  # a digit, but not one of ASCII
        ("0;1;0", None, "0 twice"),
        ("cpu;cpu:0", None, "cpu:0 twice"),
        ("0;cuda:1", None, "numbers alone and named devices"),
        ("&".join(map(str, range(5000))), None, "5000 of them, at most 4096"),
        ("0;1", "3", "1 numbers for 2 devices"),
        ("0;1", "3:1:1", "3 numbers for 2 devices"),
        ("0;1", "3:0", "wanted whole numbers from 1 to 1000000"),
        ("0;1", "3:x", "wanted whole numbers"),
        ("0;1", "1:1000001", "wanted whole numbers"),
        ("0;1", "", "wanted whole numbers"),
    ],
)
def test_what_is_not_understood_is_named(text: str, split: str | None, message: str) -> None:
    with pytest.raises(LlmcError) as caught:
        parse_placement(text, split)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_placement_by_hand_is_checked_too() -> None:
    one = Device("", 0)
    for stages, shares, message in (
        ((), (), "without a device"),
        (((),), ((),), "without a device"),
        (((one,),), ((1, 2),), "a share for each"),
        (((one,),), ((0,),), "from 1 to"),
        (((one,), (one,)), ((1,), (1,)), "0 twice"),
    ):
        with pytest.raises(LlmcError, match=message):
            Placement(stages, shares)


def test_ranks_follow_the_string() -> None:
    placement = parse_placement("5&3;1;0&2")
    assert [list(placement.ranks(stage)) for stage in range(3)] == [[0, 1], [2], [3, 4]]


_SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(_SIZES, st.randoms(use_true_random=False), st.sampled_from(["", "cpu:", "cuda:"]), st.sampled_from([";", " , "]))
def test_written_and_read_again_it_is_the_same(sizes: list[int], random: object, kind: str, between: str) -> None:
    numbers = list(range(3 * sum(sizes)))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    chosen = iter(numbers)
    stages = [[f"{kind}{next(chosen)}" for _ in range(size)] for size in sizes]
    shares = [1 + number % 7 for number in numbers[: sum(sizes)]]
    text = between.join("&".join(stage) for stage in stages)
    placement = parse_placement(text, ":".join(map(str, shares)))
    assert [[str(device) for device in stage] for stage in placement.stages] == stages
    assert [share for stage in placement.shares for share in stage] == shares
    assert parse_placement(str(placement), ":".join(map(str, shares))) == placement


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789&|;,: cpudaxyz-+.", max_size=30), st.none() | st.text("0123456789:. x", max_size=12))
def test_any_text_is_a_placement_or_an_error_of_ours(text: str, split: str | None) -> None:
    try:
        placement = parse_placement(text, split)
    except LlmcError:
        return
    assert parse_placement(str(placement)).stages == placement.stages
