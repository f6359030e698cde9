"""What a CUDA kernel asks of a kind of KV pages: a thread reads of a token, all threads of a block write one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Number = Callable[[Any], Any]  # element -> number


@dataclass(frozen=True)
class Token:
    """Where K and V of a token lie: in `kv`, its page and its place 0..15 there, of a kv head of so many elements."""

    kv: Any
    page: Any
    head: Any
    place: Any
    size: int

    def of(self, place: Any) -> Token:
        """Another one of the page."""
        return replace(self, place=place)


class Pages:
    """A kind of pages."""

    dtype: str
    unit = 1  # elements of K that are read together
    rotated = False  # whether K and V lie rotated: queries are then too, and what is made of V is turned back

    def query(self, x: Any) -> Any:
        """A number of a query as it is multiplied with K, but for the rotation."""
        return x

    def keys(self, at: Token) -> Callable[[Any], list[Any]]:
        """A function that reads the i-th `unit` elements of K, for numbers of its own; the last may be beyond."""
        raise NotImplementedError

    def values(self, at: Token) -> Callable[[Any], Any]:
        """A function that reads an element of V."""
        raise NotImplementedError

    def write(self, at: Token, key: Number, value: Number, thread: Any, threads: int) -> None:
        """K and V of a token, whose elements `key` and `value` give."""
        raise NotImplementedError

    def write_keys(self, at: Token, number: Callable[[Any, Any], Any], thread: Any, threads: int) -> None:
        """K of all tokens of a page, of which `number` gives (token, element); V stays."""
        raise NotImplementedError

    def beyond_keys(self, size: int) -> tuple[int, int]:
        """(side, first element) of a page of a kv head that `write_keys` writes nothing from."""
        raise NotImplementedError
