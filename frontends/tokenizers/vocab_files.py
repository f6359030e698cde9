"""vocab.json with merges.txt, and vocab.txt -> tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.tokenizers.added import MAX_HOLES, frame_of, token_text, with_added
from llmc.frontends.tokenizers.layouts import Layout
from llmc.frontends.tokenizers.pieces import HIDDEN, NORMAL, Piece, Vocabulary, add_special, set_frame
from llmc.frontends.tokenizers.wordpiece import Cleaning, make_wordpiece

MAX_ID = 1 << 22


def of_merges(vocab: Mapping[str, Any], merges: str, settings: Mapping[str, Any], layout: Layout) -> bytes:
    """Byte-level BPE (https://github.com/openai/gpt-2/blob/master/src/encoder.py)."""
    space = _flag(settings, "add_prefix_space", False)
    ids = {id_: text for text, id_ in vocab.items() if isinstance(id_, int) and 0 <= id_ < MAX_ID}
    if len(ids) != len(vocab) or not ids:
        raise SourceError(f"vocab.json: {len(vocab)} tokens, wanted an id from 0 below {MAX_ID} for each, no id twice")
    if max(ids) > len(ids) + MAX_HOLES:
        raise SourceError(f"vocab.json: id {max(ids)} among {len(ids)} tokens")
    pieces = [Piece(ids.get(i, f"<no token {i}>"), 0.0, NORMAL if i in ids else HIDDEN) for i in range(max(ids) + 1)]
    vocabulary = with_added(pieces, settings, layout)
    table = {piece.text: id_ for id_, piece in enumerate(vocabulary.pieces) if piece.kind != HIDDEN}
    tokenizer = Tokenizer(BPE(table, _merges(merges, table)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, vocabulary, settings, layout)


def of_words(words: str, settings: Mapping[str, Any], layout: Layout) -> bytes:
    """WordPiece: a token a line."""
    tokens = words.removesuffix("\n").split("\n")
    tokens = [token.removesuffix("\r") for token in tokens]
    if len(set(tokens)) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise SourceError(f"{clip(twice)} appears twice")
    if not _flag(settings, "do_basic_tokenize", True) or settings.get("never_split"):
        raise SourceError("tokenizer_config.json: llmc knows do_basic_tokenize = true without never_split only")
    accents = settings.get("strip_accents")
    cleaning = Cleaning(
        _flag(settings, "do_lower_case", True),
        None if accents is None else _flag(settings, "strip_accents", True),
        _flag(settings, "tokenize_chinese_chars", True),
    )
    vocabulary = with_added([Piece(token, 0.0, NORMAL) for token in tokens], settings, layout)
    unknown = token_text("unk_token", settings, layout)
    all_tokens = [piece.text for piece in vocabulary.pieces]
    tokenizer = make_wordpiece(all_tokens, str(unknown), (), cleaning)
    return _finish(tokenizer, vocabulary, settings, layout)


def _finish(tokenizer: Tokenizer, vocabulary: Vocabulary, settings: Mapping[str, Any], layout: Layout) -> bytes:
    add_special(tokenizer, vocabulary)
    set_frame(tokenizer, frame_of(vocabulary, settings, layout))
    return bytes(tokenizer.to_str().encode())


def _merges(text: str, table: Mapping[str, int]) -> list[tuple[str, str]]:
    lines = text.split("\n")
    if lines[0].startswith("#version"):
        lines = lines[1:]
    pairs = []
    for line in lines:
        if not line.strip("\r"):
            continue
        left, _, right = line.strip("\r").partition(" ")
        if left not in table or right not in table or left + right not in table:
            raise SourceError(f"{clip(line)} does not join two tokens of vocab.json to a third")
        pairs.append((left, right))
    return pairs


def _flag(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    value = settings.get(key, default)
    if not isinstance(value, bool):
        raise SourceError(f"tokenizer_config.json: {key} is {clip(value)}, wanted true or false")
    return value
