"""What changes single logits before a token is chosen: penalties, biases, tokens that may not be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.decoding.options import Options
from llmc.runtime.errors import RequestError

F64 = NDArray[np.float64]


class Penalties:
    """The tokens of one sequence whose logits are not the model's, a row each; `change` says what they become.

    Repetition: https://arxiv.org/abs/1909.05858 section 4.1, of the prompt and the answer, as in transformers.
    Presence and frequency, of the answer: https://platform.openai.com/docs/guides/text-generation#frequency-and-presence-penalties
    """

    def __init__(
        self, options: Options, prompt: Iterable[int], vocab: int, ends: Iterable[int], suppressed: Iterable[int]
    ) -> None:
        self._repetition = options.repetition_penalty
        self._presence, self._frequency = options.presence_penalty, options.frequency_penalty
        self._min_tokens = options.min_tokens
        self._place: dict[int, int] = {}  # token -> its row
        self._ids = np.zeros(16, np.int64)
        self._facts = np.zeros((4, 16))  # bias, said at all, times in the answer, end token
        self._said = 0  # tokens of the answer
        ends, never = tuple(ends), {*options.banned, *suppressed}
        if options.min_tokens:
            self._note(ends, end=True)
        for id_, bias in dict(options.logit_bias).items():
            self._note([id_], bias=bias)
        self._note(never, bias=-np.inf)
        wrong = sorted(id_ for id_ in self._place if id_ >= vocab)
        if wrong:
            raise RequestError(f"logit_bias, banned: token {wrong[0]} is none of the model's, which are 0..{vocab - 1}")
        if len(never | set(ends if options.min_tokens else ())) >= vocab:
            raise RequestError("banned: no token is left")
        if self._repetition != 1:
            self._note(prompt, said=True)

    def __len__(self) -> int:
        return len(self._place)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The tokens that are changed (m,)."""
        return self._ids[: len(self)]

    def places(self, ids: Iterable[int]) -> NDArray[np.int64]:
        """The row of each token, -1 for those that stay as they are."""
        return np.array([self._place.get(id_, -1) for id_ in ids], np.int64)

    def besides(self, ids: Iterable[int]) -> NDArray[np.int64]:
        """The tokens that are changed, less these."""
        rows = np.ones(len(self), bool)
        places = self.places(ids)
        rows[places[places >= 0]] = False
        return self.ids[rows]

    def change(self, logits: NDArray[Any]) -> F64:
        """What the logits (m,) of `ids` become; -inf for tokens that may not be chosen."""
        bias, said, times, end = self._facts[:, : len(self)]
        changed = logits + bias
        if self._repetition != 1:
            penalized = np.where(changed < 0, changed * self._repetition, changed / self._repetition)
            changed = np.where(said > 0, penalized, changed)
        changed = changed - self._presence * (times > 0) - self._frequency * times
        if self._said < self._min_tokens:
            changed[end > 0] = -np.inf
        return np.asarray(changed, np.float64)

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        self._said += 1
        if self._repetition != 1 or self._presence or self._frequency:
            self._note([token], said=True, times=1)

    def copy(self) -> Penalties:
        """One that goes on by itself."""
        other = object.__new__(Penalties)
        other.__dict__.update(self.__dict__)
        other._place, other._ids, other._facts = dict(self._place), self._ids.copy(), self._facts.copy()
        return other

    def _note(
        self, ids: Iterable[int], bias: float = 0.0, said: bool = False, times: int = 0, end: bool = False
    ) -> None:
        for id_ in ids:
            row = self._place.setdefault(int(id_), len(self._place))
            if row == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._facts = np.concatenate([self._facts, np.zeros_like(self._facts)], axis=1)
            self._ids[row] = id_
            self._facts[:, row] += (bias, said, times, end)
