"""Answers that are a JSON value of a schema, or match a regular expression or a grammar: what a token may be next.

llguidance (https://github.com/guidance-ai/llguidance) follows the grammar; here it meets the model's tokens and logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.decoding.candidates import Row
from llmc.runtime.decoding.options import Options
from llmc.runtime.errors import RequestError
from llmc.runtime.text.tokenizer import Tokenizer

F32 = NDArray[np.float32]

_MOST_STATES = 20_000  # of what cuts a text into words: 1 or 2 kB each, and schemas in use have some hundreds


class Grammars:
    """Grammars over a model's tokens. Raises RequestError where the library is not there, or the tokens do not fit."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        try:
            self._library: Any = import_module("llguidance")
        except ModuleNotFoundError:
            raise RequestError(
                "json_schema, regex and lark need llguidance, which is not here: pip install 'llmc[grammar]'"
            ) from None
        if not ends:
            raise RequestError("json_schema, regex, lark: this model has no end token, with which an answer is done")
        if not tokenizer.has_bytes:
            raise RequestError(
                "json_schema, regex, lark: the tokens of this model's tokenizer have no bytes of their own"
            )
        self._vocab = vocab
        self._tokens = self._library.LLTokenizer(_Tokens(tokenizer, vocab, ends), n_vocab=vocab, eos_token=list(ends))

    def of(self, options: Options) -> Grammar | None:
        """What the options ask for, at its beginning; None if they ask for none. RequestError if it makes no sense."""
        kind = options.form
        if kind is None:
            return None
        matcher, limits = self._library.LLMatcher, self._library.LLParserLimits(max_lexer_states=_MOST_STATES)
        make = {"json_schema": matcher.grammar_from_json_schema, "regex": matcher.grammar_from_regex,
                "lark": matcher.grammar_from_lark}[kind]  # fmt: skip
        text = make(getattr(options, kind))
        fault = matcher.validate_grammar(text, self._tokens, limits=limits)
        if fault and not fault.startswith("WARNING"):
            raise RequestError(f"{kind}: {_line(fault)}")
        return Grammar(kind, matcher(self._tokens, text, log_level=0, limits=limits), self._vocab)


class Grammar:
    """Where an answer stands in its grammar."""

    def __init__(self, kind: str, matcher: Any, vocab: int) -> None:
        self._kind, self._matcher, self._vocab = kind, matcher, vocab

    def allowed(self, row: Row) -> Row:
        """The row with -inf for the tokens that may not be next. RequestError where the grammar asks too much."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        may = np.unpackbits(mask, count=self._vocab, bitorder="little").astype(bool)
        if not may.any():
            raise RequestError(f"{self._kind}: no token of the model goes on with it")
        listed = may[row.ids]
        if not listed.any():
            return Row.of(_masked(row.logits, may))
        # The likeliest of those that may be are the likeliest of all, less others: nothing has to be sorted.
        most = float(row.values[listed][0])
        normalizer = most + math.log(float(np.exp(row.logits[may] - np.float32(most)).sum(dtype=np.float64)))
        ids, values = row.ids[listed], row.values[listed]
        return Row(row.vocab, lambda: _masked(row.logits, may), ids, values, normalizer)

    def forced(self) -> list[int]:
        """Tokens that write the bytes that must come next, as the tokenizer would; none where there is a choice."""
        found: list[int] = self._matcher.compute_ff_tokens()
        return found

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> Grammar:
        """One that goes on by itself."""
        return Grammar(self._kind, self._matcher.deep_copy(), self._vocab)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"{self._kind}: {_line(self._matcher.get_error())}")


def _line(fault: str) -> str:
    """The library's words, without what it tells of its insides."""
    return " ".join(fault.partition("<state>")[0].split())[:300]


def _masked(logits: F32, may: NDArray[np.bool_]) -> F32:
    return np.where(may, logits, np.float32(-np.inf))


class _Tokens:
    """The vocabulary as the library asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.tokens = [tokenizer.token_bytes(id_) for id_ in range(vocab)]
        self.special_token_ids = sorted(tokenizer.special_ids | set(ends))
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, bos=False)
