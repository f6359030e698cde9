"""tokenizer.model of SentencePiece -> the metadata that a GGUF file would have of it. BPE with byte fallback only.

Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto, in Protocol Buffers' wire
format (https://protobuf.dev/programming-guides/encoding/): fields of a number and a value, messages in messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.gguf.tokenizer import NORMAL

MAX_TOKENS = 1 << 24
_BPE = 2  # trainer_spec.model_type
_UNIGRAM = 1

# Wire types, and the bytes of those of fixed size.
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}

Field = tuple[int, Any]  # number, and an int or bytes


def read_model(data: bytes) -> dict[str, Any]:
    """Raises SourceError for what is damaged, and for a model that changes texts in a way llmc does not know."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            token, score, kind = _piece(_message(value), len(tokens))
            tokens.append(token)
            scores.append(score)
            types.append(kind)
        elif number == 2:
            trainer |= dict(_fields(_message(value)))
        elif number == 3:
            normalizer |= dict(_fields(_message(value)))
    _check(trainer, normalizer)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    }


def _check(trainer: dict[int, Any], normalizer: dict[int, Any]) -> None:
    wanted = {
        "trainer_spec.model_type": (trainer.get(3, _UNIGRAM), _BPE),
        "trainer_spec.treat_whitespace_as_suffix": (trainer.get(24, 0), 0),
        "trainer_spec.byte_fallback": (trainer.get(35, 0), 1),
        "normalizer_spec.precompiled_charsmap": (normalizer.get(2, b""), b""),
        "normalizer_spec.remove_extra_whitespaces": (normalizer.get(4, 1), 0),
        "normalizer_spec.escape_whitespaces": (normalizer.get(5, 1), 1),
        "normalizer_spec.normalization_rule_tsv": (normalizer.get(6, b""), b""),
    }
    faults = [f"{name} = {clip(got)}, wanted {want!r}" for name, (got, want) in wanted.items() if got != want]
    if faults:
        raise SourceError(
            f"{'; '.join(faults)}: llmc knows BPE that leaves texts as they are; save tokenizer.json with "
            "transformers, or tokenizer.bin with llama2.c's tokenizer.py"
        )


def _piece(data: bytes, index: int) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    text, score, kind = fields.get(1, b""), fields.get(2, bytes(4)), fields.get(3, NORMAL)
    whole = isinstance(text, bytes) and isinstance(score, bytes) and len(score) == 4 and isinstance(kind, int)
    if not whole or index >= MAX_TOKENS:
        raise SourceError(f"token {index} is {clip(fields)}, wanted a text, a score and a type")
    try:
        return text.decode("utf-8"), struct.unpack("<f", score)[0], kind
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
