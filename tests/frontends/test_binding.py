"""Names in error messages are short however many there are."""

from __future__ import annotations

from llmc.frontends.binding import SHOWN, group_names


def test_groups() -> None:
    names = [f"layers.{i}.q" for i in (0, 1, 2, 5, 7)] + ["layers.3.k", "head"]
    assert group_names(names) == "layers.{0-2,5,7}.q, layers.3.k, head"


def test_many_names_are_cut() -> None:
    text = group_names([f"tensor_{'x' * i}" for i in range(SHOWN + 5)])
    assert text.endswith(" and 5 more")


def test_hostile_names_are_escaped() -> None:
    assert group_names(["a\nb", "\x1b[2J"]) == r"'a\nb', '\x1b[2J'"
    assert len(group_names(["x" * 10**6])) < 200
    assert group_names(["n" + "9" * 5000]).startswith("'n999")
