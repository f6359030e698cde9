"""tokenizer.model, spiece.model, source.spm ... of SentencePiece -> pieces and settings.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, in Protocol Buffers' wire
format (https://protobuf.dev/programming-guides/encoding/): fields of a number and a value, messages in messages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.tokenizers.pieces import NORMAL, UNKNOWN, Piece, Rules

MAX_TOKENS = 1 << 24
_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type
_TYPES = range(1, 7)

# Wire types, and the bytes of those of fixed size.
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}

Field = tuple[int, Any]  # number, and an int or bytes


@dataclass(frozen=True)
class SentencePieceModel:
    """What the file holds: pieces in the order of its ids, and how texts are normalized and cut."""

    pieces: tuple[Piece, ...]
    rules: Rules


def read_model(data: bytes) -> SentencePieceModel:
    """Raises SourceError for what is damaged, and for a model that changes texts in a way llmc does not know."""
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    denormalizer: dict[int, Any] = {}
    parts = {2: trainer, 3: normalizer, 5: denormalizer}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_message(value), len(pieces)))
        elif number in parts:
            parts[number] |= dict(_fields(_message(value)))
    _check(trainer, normalizer, denormalizer)
    _check_pieces(pieces)
    return SentencePieceModel(
        tuple(pieces),
        Rules(
            kind="unigram" if trainer.get(3, _UNIGRAM) == _UNIGRAM else "bpe",
            byte_fallback=bool(trainer.get(35, 0)),
            charsmap=normalizer.get(2, b""),
            prefix=bool(normalizer.get(3, 1)),
            trim=bool(normalizer.get(4, 1)),
        ),
    )


def _check(trainer: dict[int, Any], normalizer: dict[int, Any], denormalizer: dict[int, Any]) -> None:
    flags = {
        "trainer_spec.model_type (unigram 1, BPE 2)": (trainer.get(3, _UNIGRAM), (_UNIGRAM, _BPE)),
        "trainer_spec.treat_whitespace_as_suffix": (trainer.get(24, 0), (0,)),
        "trainer_spec.byte_fallback": (trainer.get(35, 0), (0, 1)),
        "normalizer_spec.add_dummy_prefix": (normalizer.get(3, 1), (0, 1)),
        "normalizer_spec.remove_extra_whitespaces": (normalizer.get(4, 1), (0, 1)),
        "normalizer_spec.escape_whitespaces": (normalizer.get(5, 1), (1,)),
        "denormalizer_spec.precompiled_charsmap": (denormalizer.get(2, b""), (b"",)),
    }
    faults = [
        f"{name} = {clip(got)}, wanted {' or '.join(map(repr, want))}"
        for name, (got, want) in flags.items()
        if got not in want
    ]
    if not isinstance(normalizer.get(2, b""), bytes):
        faults.append(f"normalizer_spec.precompiled_charsmap = {clip(normalizer[2])}, wanted bytes")
    if faults:
        raise SourceError(f"{'; '.join(faults)}: llmc does not know such models; save tokenizer.json with transformers")


def _check_pieces(pieces: list[Piece]) -> None:
    unknown = sum(piece.kind == UNKNOWN for piece in pieces)
    if unknown != 1:
        raise _damaged(f"{unknown} of {len(pieces)} pieces are of type unknown, wanted one")


def _piece(data: bytes, index: int) -> Piece:
    fields = dict(_fields(data))
    text, score, kind = fields.get(1, b""), fields.get(2, bytes(4)), fields.get(3, NORMAL)
    whole = isinstance(text, bytes) and text and isinstance(score, bytes) and len(score) == 4 and kind in _TYPES
    value = struct.unpack("<f", score)[0] if whole else math.nan
    if not math.isfinite(value) or index >= MAX_TOKENS:
        raise SourceError(f"token {index} is {clip(fields)}, wanted a text, a finite score and a type of 1 to 6")
    try:
        return Piece(text.decode("utf-8"), value, kind)
    except UnicodeDecodeError:
        raise SourceError(f"token {index}, {clip(text)}, is not UTF-8") from None


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise _damaged(f"{clip(value)} in place of a message")
    return value


def _fields(data: bytes) -> Iterator[Field]:
    """The fields of a message; numbers as int, all else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise _damaged(f"a field of kind {kind}")
        if length > len(data) - at:
            raise _damaged(f"{length} bytes wanted, but there are {len(data) - at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise _damaged("it ends within a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise _damaged("a number of more than 64 bits")


def _damaged(problem: str) -> SourceError:
    return SourceError(f"not a SentencePiece model, or damaged: {problem}")
