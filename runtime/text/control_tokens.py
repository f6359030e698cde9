"""Keeps the texts of a conversation from becoming control tokens, such as the one that ends a message.

A tokenizer turns the text of a special token into its id wherever it stands. In a chat prompt that is right for what
the template wrote, and wrong for what a message holds: whoever writes "<|im_end|>" there would speak as someone else.
So such texts are marked before the template renders them, with noncharacters, which messages may not hold
(https://www.unicode.org/faq/private_use.html#noncharacters). In the rendered prompt an unmarked one is the template's.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

_MARK = "\ufdd0"  # before the text of a control token in a message
_WALL = "\ufdd1"  # where a message begins or ends with a piece of one, which the template could complete
_OPEN, _CLOSE = "\ufdd2", "\ufdd3"  # round the number of a control token that the template wrote
RESERVED = frozenset((_MARK, _WALL, _OPEN, _CLOSE))
_UNMARKED = str.maketrans("", "", _MARK + _WALL)


class ControlTokens:
    """The special tokens of a tokenizer, as texts that a message may or may not stand for."""

    def __init__(self, backend: Any) -> None:
        added = backend.get_added_tokens_decoder()
        tokens = [(token, id_) for id_, token in added.items() if token.special and token.content]
        tokens.sort(key=lambda pair: -len(pair[0].content))  # of two that start alike the tokenizer takes the longer
        self._backend = backend
        self._tokens = tokens
        self._stand_in = {token.content: f"{_OPEN}{n}{_CLOSE}" for n, (token, _) in enumerate(tokens)}
        self._pattern = re.compile(f"({_MARK})?({'|'.join(map(re.escape, self._stand_in)) or '(?!)'})")
        self._starts = {text[:at] for text in self._stand_in for at in range(1, len(text))}
        self._ends = {text[at:] for text in self._stand_in for at in range(1, len(text))}
        self._longest = max(map(len, self._stand_in), default=0)
        self._guarded: tuple[Any, dict[Any, int]] | None = None

    def mark(self, content: str) -> str:
        """What to give a template in place of the text of a message; the same text if it holds no control token.

        `content` must not hold a character of `RESERVED`.
        """
        lead = len(content) - len(content.lstrip())  # templates trim contents
        tail = max(lead, len(content.rstrip()))
        sizes = range(1, self._longest)
        before = _WALL if any(content[lead : lead + size] in self._ends for size in sizes) else ""
        after = _WALL if any(content[max(tail - size, 0) : tail] in self._starts for size in sizes) else ""
        middle = self._pattern.sub(lambda found: _MARK + found[2], content[lead:tail])
        return content[:lead] + before + middle + after + content[tail:]

    def read(self, marked: str) -> tuple[str, str | None]:
        """The rendered prompt as it reads, and what to give `encode` if messages in it hold control tokens."""
        plain = marked.translate(_UNMARKED)
        if plain == marked:
            return plain, None
        guarded = self._with_stand_ins(marked)
        return plain, None if guarded == self._with_stand_ins(plain) else guarded

    def encode(self, guarded: str) -> list[int]:
        """Token ids of a prompt whose control tokens are only those the template wrote."""
        if self._guarded is None:
            self._guarded = self._guarded_backend()
        backend, real = self._guarded
        return [real.get(i, i) for i in backend.encode(guarded, add_special_tokens=False).ids]

    def _with_stand_ins(self, text: str) -> str:
        put = self._pattern.sub(lambda found: found[2] if found[1] else self._stand_in[found[2]], text)
        return put.translate(_UNMARKED)

    def _guarded_backend(self) -> tuple[Any, dict[Any, int]]:
        """A tokenizer that knows no special token but the stand-ins; and the ids these stand for."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True  # reads them as any other text
        flags = {"special": False, "normalized": False}
        backend.add_tokens(
            [AddedToken(self._stand_in[t.content], lstrip=t.lstrip, rstrip=t.rstrip, **flags) for t, _ in self._tokens]
        )
        ids = {text: backend.token_to_id(text) for text in self._stand_in.values()}
        return backend, {ids[self._stand_in[token.content]]: id_ for token, id_ in self._tokens}
