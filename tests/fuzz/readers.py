"""The readers of untrusted input, by the names that run.py knows: what is valid, how it is changed, what reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from binary_readers import BINARY
from graph_readers import GRAPHS
from reader import Reader
from text_readers import TEXT
from tokenizer_readers import TOKENIZERS

READERS: dict[str, Callable[[Path], Reader]] = {**BINARY, **TEXT, **TOKENIZERS, **GRAPHS}
__all__ = ["READERS", "Reader"]
