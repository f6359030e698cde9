"""A SentencePiece model and a folder's settings -> tokenizer.json with the ids that the folder's class gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.tokenizers.added import MAX_HOLES, frame_of, numbered_tokens, token_text, with_added
from llmc.frontends.tokenizers.layouts import LANGUAGE_CODES, Layout
from llmc.frontends.tokenizers.pieces import (
    CONTROL,
    HIDDEN,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    Rules,
    Vocabulary,
    make_json,
)
from llmc.frontends.tokenizers.sentencepiece_model import SentencePieceModel

MAX_ID = 1 << 22
_MAX_EXTRA = 1 << 12


def of_sentencepiece(model: SentencePieceModel, settings: Mapping[str, Any], layout: Layout) -> bytes:
    """tokenizer.json of a model whose pieces are the vocabulary."""
    pieces = _arranged(model, settings, layout)
    vocabulary = with_added(pieces, settings, layout)
    rules = _rules(model.rules, settings)
    return make_json(_single_characters(vocabulary, rules), rules, frame_of(vocabulary, settings, layout))


def of_vocab(model: SentencePieceModel, vocab: Mapping[str, Any], settings: Mapping[str, Any], layout: Layout) -> bytes:
    """tokenizer.json of a model that cuts texts into pieces whose ids are in vocab.json.

    A piece that vocab.json lacks is the unknown token. An entry that the model lacks is the other language's, which no
    text becomes. (transformers looks a run of characters that the model does not know up among these.)
    """
    ids = _ids(vocab)
    unknown = token_text("unk_token", settings, layout)
    if unknown not in ids.values():
        raise SourceError(f"vocab.json lacks the unknown token {clip(unknown)}")
    known = {piece.text: piece for piece in model.pieces}
    languages = _languages(settings)
    pieces = []
    for id_ in range(max(ids) + 1):
        text = ids.get(id_, f"<no token {id_}>")
        piece = known.get(text, Piece(text, 0.0, HIDDEN))
        if text == unknown:
            piece = Piece(text, 0.0, UNKNOWN)
        elif piece.kind == UNKNOWN or _is_code(text):
            piece = Piece(text, 0.0, CONTROL)
        pieces.append(piece)
    pieces += [Piece(f"__{code}__", 0.0, CONTROL) for code in languages if f"__{code}__" not in vocab]
    pieces += [Piece(f"<made up {i}>", 0.0, HIDDEN) for i in range(_made_up(settings))]
    vocabulary = with_added(pieces, settings, layout)
    texts = {piece.text for piece in vocabulary.pieces}
    beyond = [piece for piece in model.pieces if piece.text not in texts and piece.kind in (NORMAL, USER_DEFINED)]
    whole = Vocabulary([*vocabulary.pieces, *beyond], len(vocabulary.pieces) if beyond else None, vocabulary.added)
    rules = _rules(model.rules, settings)
    return make_json(_single_characters(whole, rules), rules, frame_of(vocabulary, settings, layout))


def _arranged(model: SentencePieceModel, settings: Mapping[str, Any], layout: Layout) -> list[Piece]:
    unknown = token_text("unk_token", settings, layout)
    if not layout.first:
        pieces = list(model.pieces)
    else:
        front = [Piece(text, 0.0, UNKNOWN if text == unknown else CONTROL) for text in layout.first]
        pieces = front + list(model.pieces[layout.replaced :])
        if unknown not in layout.first and not any(piece.kind == UNKNOWN for piece in pieces):
            raise SourceError(f"the unknown token {clip(unknown)} is none of the pieces")
    texts = {piece.text for piece in pieces}
    numbered = {text for _, text, _ in numbered_tokens(settings)}
    last = [text for text in layout.last if text not in texts and text not in numbered]
    if layout.extra_ids:
        count = settings.get("extra_ids", 100)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MAX_EXTRA:
            raise SourceError(f"tokenizer_config.json: extra_ids is {clip(count)}, wanted 0 to {_MAX_EXTRA}")
        last += [
            text for i in reversed(range(count)) if (text := f"<extra_id_{i}>") not in texts and text not in numbered
        ]
    return pieces + [Piece(text, 0.0, CONTROL) for text in last]


def _rules(rules: Rules, settings: Mapping[str, Any]) -> Rules:
    for key in ("legacy", "add_prefix_space", "do_lower_case"):
        if not isinstance(settings.get(key, False), bool):
            raise SourceError(f"tokenizer_config.json: {key} is {clip(settings[key])}, wanted true or false")
    if settings.get("do_lower_case", False):
        raise SourceError("tokenizer_config.json has do_lower_case = True, which llmc does not know of SentencePiece")
    prefix = rules.prefix and settings.get("add_prefix_space", True)
    return replace(rules, prefix=prefix, prefix_once=not settings.get("legacy", True))


def _single_characters(vocabulary: Vocabulary, rules: Rules) -> Vocabulary:
    """With user-defined pieces of one character as plain ones, where a token found before would begin a text anew."""
    if rules.kind != "bpe" or not rules.prefix:
        return vocabulary
    pieces = [
        replace(piece, kind=NORMAL) if piece.kind == USER_DEFINED and len(piece.text) == 1 else piece
        for piece in vocabulary.pieces
    ]
    return replace(vocabulary, pieces=pieces)


def _ids(vocab: Mapping[str, Any]) -> dict[int, str]:
    if not vocab:
        raise SourceError("no vocab.json beside it, or an empty one")
    wrong = [text for text, id_ in vocab.items() if not isinstance(id_, int) or isinstance(id_, bool)]
    if wrong or not all(0 <= id_ < MAX_ID for id_ in vocab.values()):
        raise SourceError(f"vocab.json: {clip(wrong or max(vocab.values()))}, wanted ids from 0 below {MAX_ID}")
    ids = {id_: text for text, id_ in vocab.items()}
    if len(ids) != len(vocab):
        raise SourceError("vocab.json: two tokens have the same id")
    if max(ids) > len(ids) + MAX_HOLES:
        raise SourceError(f"vocab.json: id {max(ids)} among {len(ids)} tokens")
    return ids


def _languages(settings: Mapping[str, Any]) -> list[str]:
    codes = settings.get("language_codes")
    if codes is None:
        # Older folders list them as special tokens.
        listed = settings.get("additional_special_tokens", [])
        if not isinstance(listed, list):
            raise SourceError(f"tokenizer_config.json: additional_special_tokens is {clip(listed)}, wanted a list")
        return [text[2:-2] for text in listed if isinstance(text, str) and text[:2] == text[-2:] == "__"]
    if not isinstance(codes, str) or codes not in LANGUAGE_CODES:
        raise SourceError(f"tokenizer_config.json: language_codes is {clip(codes)}, wanted {', '.join(LANGUAGE_CODES)}")
    return list(LANGUAGE_CODES[codes])


def _made_up(settings: Mapping[str, Any]) -> int:
    count = settings.get("num_madeup_words", 0)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MAX_EXTRA:
        raise SourceError(f"tokenizer_config.json: num_madeup_words is {clip(count)}, wanted 0 to {_MAX_EXTRA}")
    return count


def _is_code(text: str) -> bool:
    """Marian's >>fr<<, which tells a model of several languages which to write."""
    return text.startswith(">>") and text.endswith("<<")
