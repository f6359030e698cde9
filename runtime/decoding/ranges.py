"""What the value of an option may be, and how a wrong one is told."""

from __future__ import annotations

from numbers import Integral, Real
from typing import NamedTuple

MAX_INT32 = 2**31 - 1
MAX_LOGPROBS = 64  # likeliest tokens that a compiled step returns at most


class Number(NamedTuple):
    """Numbers from low to high, both included unless `above` (low is not); `whole` ones only."""

    low: float
    high: float
    whole: bool = False
    above: bool = False

    def fault(self, name: str, value: object) -> str:
        """What is wrong with the value, or "".

        >>> Number(0, 1, above=True).fault("top_p", 0)
        'top_p: got 0, wanted a number above 0, at most 1'
        """
        good = isinstance(value, Integral if self.whole else Real) and not isinstance(value, bool)
        if good and self.low <= value <= self.high and not (self.above and value == self.low):  # type: ignore[operator]
            return ""  # NaN is in no range
        kind = "a whole number" if self.whole else "a number"
        bounds = f"in {_written(self.low)}..{_written(self.high)}"
        if self.above:
            bounds = f"above {_written(self.low)}, at most {_written(self.high)}"
        return f"{name}: got {shown(value)}, wanted {kind} {bounds}"


class Words(NamedTuple):
    """One of these words; "" stands for none of them."""

    words: tuple[str, ...]

    def fault(self, name: str, value: object) -> str:
        """What is wrong with the value, or ""."""
        if isinstance(value, str) and value in self.words:
            return ""
        return f"{name}: got {shown(value)}, wanted {', '.join(word for word in self.words if word)}"


def shown(value: object) -> str:
    """A value as a message can show it.

    >>> shown("x" * 99)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
    """
    try:
        return repr(value)[:40]
    except ValueError:  # Python does not write integers of thousands of digits
        return "a huge number"


def _written(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
