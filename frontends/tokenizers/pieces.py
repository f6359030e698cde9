"""Pieces of SentencePiece with ids, and rules -> a tokenizer of the library that gives SentencePiece's ids.

What it computes: https://github.com/google/sentencepiece/blob/master/src/unigram_model.cc and bpe_model.cc.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.tokenizers.charsmap import normalizer_steps

# Types of a piece, as in SentencePiece and GGUF; HIDDEN is ours: it has an id, and no text becomes it.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
HIDDEN = 0
_MAX_PIECE = 1 << 8  # characters of a piece, each of whose cuts is looked at
_SPACE = "\u2581"  # SentencePiece's visible space
HIDING = "\ufdd0"  # a noncharacter before the text of a hidden piece; decoding takes it away
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_UNKNOWN_COST = 10.0  # unigram_model.cc kUnkPenalty, which the library has too


@dataclass(frozen=True)
class Piece:
    """One token: text, score, type."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class Rules:
    """How texts are changed and cut. `prefix`: a text starts with a space; `trim`: runs of spaces become one."""

    kind: str  # "unigram" or "bpe"
    byte_fallback: bool
    charsmap: bytes
    prefix: bool
    trim: bool
    prefix_once: bool = False  # not after a special token as well


@dataclass(frozen=True)
class Frame:
    """What stands round a text: ids or None."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True)
class Added:
    """An added token's own settings, where it has some."""

    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """Every token in the order of ids. Those from `known` on are unknown to the model: encoding gives the unknown's id.

    `added`: text -> settings, of tokens that are found in a text before it is cut.
    """

    pieces: Sequence[Piece]
    known: int | None = None
    added: Mapping[str, Added] = field(default_factory=dict)


def make_json(vocabulary: Vocabulary, rules: Rules, frame: Frame) -> bytes:
    """tokenizer.json."""
    tokenizer = make_tokenizer(vocabulary, rules)
    set_frame(tokenizer, frame)
    if vocabulary.known is None:
        return bytes(tokenizer.to_str().encode())
    table = json.loads(tokenizer.to_str())
    table["model"]["unknown_from"] = vocabulary.known  # runtime/text/tokenizer.py; the library does not read it
    return json.dumps(table, ensure_ascii=False).encode()


def make_tokenizer(vocabulary: Vocabulary, rules: Rules) -> Tokenizer:
    """The library's tokenizer. Raises SourceError when the pieces cannot be what the rules want."""
    pieces = vocabulary.pieces
    _check(pieces, rules)
    texts = [HIDING + piece.text if piece.kind == HIDDEN else piece.text for piece in pieces]
    tokenizer = Tokenizer(_unigram(pieces, texts, rules) if rules.kind == "unigram" else _bpe(pieces, texts, rules))
    steps = normalizer_steps(rules.charsmap, [piece.text for piece in pieces], rules.byte_fallback)
    if rules.trim:
        # As normalizer.cc does it: a visible space in the text itself counts at its end only.
        steps += [
            normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if rules.prefix and not rules.prefix_once:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    cuts: list[Any] = []
    if rules.prefix and rules.prefix_once:
        cuts.append(pre_tokenizers.Metaspace(_SPACE, "first", split=False))
    if rules.kind == "unigram" and rules.byte_fallback:
        # A text that spells a byte's token is not that byte.
        cuts.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated"))
    if cuts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = _decoder(rules, any(piece.kind == HIDDEN for piece in pieces))
    add_special(tokenizer, vocabulary, rules)
    return tokenizer


def set_frame(tokenizer: Tokenizer, frame: Frame) -> None:
    """Has the tokenizer put ids round a text. Raises SourceError for names that a template takes for something else."""
    named = {id_: str(tokenizer.id_to_token(id_)) for id_ in (frame.before, frame.after) if id_ is not None}
    odd = [text for text in named.values() if ":" in text or text.startswith("$")]
    if odd:
        raise SourceError(f"{clip(odd[0])} cannot stand round a text: its name has : in it, or begins with $")
    if not named:
        return
    before = [] if frame.before is None else [named[frame.before]]
    after = [] if frame.after is None else [named[frame.after]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=[(text, id_) for id_, text in named.items()]
    )


def _check(pieces: Sequence[Piece], rules: Rules) -> None:
    if not all(math.isfinite(piece.score) for piece in pieces):
        raise SourceError(f"scores of {len(pieces)} pieces, wanted {len(pieces)} finite numbers")
    texts = {piece.text for piece in pieces}
    if len(texts) != len(pieces):
        twice = next(text for text, count in Counter(piece.text for piece in pieces).items() if count > 1)
        raise SourceError(f"piece {clip(twice)} appears twice")
    absent = [text for text in _BYTES if text not in texts] if rules.byte_fallback else []
    if absent:
        raise SourceError(f"lacks {len(absent)} byte tokens, first {absent[0]}")


def _unigram(pieces: Sequence[Piece], texts: list[str], rules: Rules) -> Unigram:
    scores = [piece.score for piece in pieces if piece.kind == NORMAL] or [0.0]
    least, most = min(scores), max(scores)
    rows = []
    for piece, text in zip(pieces, texts, strict=True):
        if piece.kind == USER_DEFINED:
            score = len(text.encode()) * most - 0.1  # unigram_model.cc: always chosen
        elif piece.kind == UNUSED:
            score = 8 * (min(least, 0.0) - _UNKNOWN_COST)  # the last choice
        else:
            score = piece.score if piece.kind == NORMAL else least
        rows.append((text, score))
    unknown = next((id_ for id_, piece in enumerate(pieces) if piece.kind == UNKNOWN), None)
    if unknown is None:
        raise SourceError("no piece is of type unknown (2)")
    return Unigram(rows, unknown, rules.byte_fallback)


def _bpe(pieces: Sequence[Piece], texts: list[str], rules: Rules) -> BPE:
    vocab = {text: id_ for id_, text in enumerate(texts)}
    unknown = next((piece.text for piece in pieces if piece.kind == UNKNOWN), None)
    return BPE(vocab, merges_of_scores(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=rules.byte_fallback)


def merges_of_scores(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, the best score of the third first.

    Tokens that stand for no text are never the result: no text that spells one becomes it.
    """
    vocab = {piece.text: id_ for id_, piece in enumerate(pieces) if piece.kind != HIDDEN}
    ranked = []
    for id_, piece in enumerate(pieces):
        if piece.kind in (HIDDEN, UNKNOWN, CONTROL, BYTE) or len(piece.text) > _MAX_PIECE:
            continue
        token = piece.text
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-piece.score, id_, left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _decoder(rules: Rules, hiding: bool) -> Any:
    shown = [decoders.Replace(HIDING, "")] if hiding else []
    fallback = [decoders.ByteFallback()] if rules.byte_fallback else []
    steps = [*shown, decoders.Replace(_SPACE, " "), *fallback, decoders.Fuse()]
    return decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if rules.prefix else []))


def add_special(tokenizer: Tokenizer, vocabulary: Vocabulary, rules: Rules | None = None) -> None:
    """Control tokens are special (left out of decoded text), user-defined ones are not.

    A unigram model chooses its user-defined pieces by itself.
    """
    control: list[Any] = []
    defined: list[Any] = []
    for piece in vocabulary.pieces:
        own = vocabulary.added.get(piece.text)
        if piece.kind == HIDDEN:
            continue
        if own is not None:
            flags = {"lstrip": own.lstrip, "rstrip": own.rstrip, "single_word": own.single_word}
            token = AddedToken(piece.text, special=own.special, normalized=False, **flags)
            (control if own.special else defined).append(token)
        elif piece.kind in (UNKNOWN, CONTROL):
            control.append(AddedToken(piece.text, special=True, normalized=False))
        elif piece.kind == USER_DEFINED and (rules is None or rules.kind == "bpe"):
            defined.append(AddedToken(piece.text, special=False, normalized=False))
    # In two calls: each one rebuilds the library's search tree, and some vocabularies have thousands.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)
    texts = {token.content for token in (*control, *defined)}
    for id_, piece in enumerate(vocabulary.pieces):
        if piece.text in texts and tokenizer.token_to_id(piece.text) != id_:
            raise SourceError(f"{clip(piece.text)} cannot be given its id {id_}")
