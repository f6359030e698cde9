"""What a family's file may say about places: rope, windows, layers without rope. positions.py and rope.py read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WINDOW_RULES = ("all", "after", "every", "plain", "none", "listed")
PLAIN_RULES = ("full", "full beside windows", "listed")


@dataclass(frozen=True)
class Rope:
    """What the keys about rope are, besides `rope_parameters` and `rope_scaling`; other families have none.

    `theta`: its base when no key of `keys` says one. `partial`: the part of a head that is rotated when no key of
    `partial_keys` and neither table says it; 0: the family always rotates whole heads. `window_theta`: layers with a
    window have rope of their own, of this base unless a key of `window_keys` says one; 0: the same as the others.
    `original_key`: the length the model was first trained for, outside of the tables, `original` when absent.
    `kinds`: other names of kinds of scaling. `absent`: what `rope_parameters` is when absent. `scores`: where rope is
    scaled and its table has `mscale_all_dim`, attention's scores grow with the texts' length too. `alpha`: a "dynamic"
    table may have an alpha, by which the base grows whatever the length. `queries`: one of yarn may have
    `llama_4_scaling_beta`, by which queries grow with their places. `list_key`: a list of every layer's base, 0 for no
    rope.
    """

    theta: float = 10000.0
    keys: tuple[str, ...] = ("rope_theta",)
    partial: float = 0.0
    partial_keys: tuple[str, ...] = ("partial_rotary_factor",)
    window_theta: float = 0.0
    window_keys: tuple[str, ...] = ()
    original_key: str = ""
    original: int = 0
    kinds: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, Any] = field(default_factory=dict)
    scores: bool = False
    alpha: bool = False
    queries: bool = False
    list_key: str = ""


@dataclass(frozen=True)
class Windows:
    """Which layers have a sliding window of `size_key` tokens: those that `types_key` lists, or else by `rule`.

    "listed": the list must be there; "all"; "after": those from `max_window_layers` on; "every": all but the last (or
    `full` "first") of each `period_key` layers; "plain": those without rope; "none". `null_off`: a null size means no
    windows by "every" too.

    `share` and `more`: the size is the key's number divided by the one, plus the other.

    `names`: what the list calls a full layer and one with a window. `runs_key`: in place of a list, pairs of a list and
    how often it comes (GPT-Neo). The other fields are what absent keys mean; `size` 0 stands for null, and without
    `types`, `switch` or `period_key` the family has no such key.
    """

    rule: str
    size: int
    size_key: str = "sliding_window"
    switch: bool | None = None  # use_sliding_window
    first: int = 0  # max_window_layers
    period: int = 0
    period_key: str = ""
    full: str = "last"
    null_off: bool = False
    types: bool = False
    types_key: str = "layer_types"
    names: tuple[str, ...] = ("full_attention", "sliding_attention")
    runs_key: str = ""
    share: int = 1
    more: int = 0

    def keys(self) -> tuple[str, ...]:
        """The keys that the family reads for this."""
        there = {
            self.size_key: True, "use_sliding_window": self.switch is not None, self.period_key: self.period_key != "",
            "max_window_layers": self.rule == "after", self.types_key: self.types, self.runs_key: self.runs_key != "",
        }  # fmt: skip
        return tuple(key for key, wanted in there.items() if wanted)


@dataclass(frozen=True)
class Plain:
    """Which layers have no rope: by `rule`.

    "full": those without a window; "full beside windows": the same, but none when the size of windows is null;
    "listed": those that are 0 in `no_rope_layers`, or else every `no_rope_layer_interval`-th, `period` when absent.
    """

    rule: str
    period: int = 0

    def keys(self) -> tuple[str, ...]:
        """The keys that the family reads for this."""
        return ("no_rope_layers", "no_rope_layer_interval") if self.rule == "listed" else ()
