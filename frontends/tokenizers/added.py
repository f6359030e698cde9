"""The tokens that tokenizer_config.json adds to a vocabulary or marks in it, each at its id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.tokenizers.check import check_texts
from llmc.frontends.tokenizers.layouts import Layout
from llmc.frontends.tokenizers.pieces import CONTROL, HIDDEN, NORMAL, Added, Frame, Piece, Vocabulary

_MASK = "mask_token"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word")
_MAX_ADDED = 1 << 20
_MAX_ID = 1 << 22
MAX_HOLES = 1 << 14  # ids that no token has, below one that a token has


def with_added(pieces: Sequence[Piece], settings: Mapping[str, Any], layout: Layout) -> Vocabulary:
    """The pieces with every token that the settings name, at the ids they give or else at the end.

    Raises SourceError where an id has another text already.
    """
    all_pieces = list(pieces)
    places = {piece.text: id_ for id_, piece in enumerate(all_pieces)}
    added: dict[str, Added] = {}
    for id_, text, own in numbered_tokens(settings):
        if places.get(text, id_) != id_ or (id_ < len(all_pieces) and all_pieces[id_].text != text):
            there = all_pieces[id_].text if id_ < len(all_pieces) else None
            raise SourceError(
                f"added token {clip(text)} has id {id_}, but {clip(there)} has it, or {clip(text)} another: "
                "these files are not of one tokenizer"
            )
        if id_ > len(all_pieces) + MAX_HOLES:
            raise SourceError(
                f"added token {clip(text)} has id {id_}, but there are {len(all_pieces)} tokens before it"
            )
        while len(all_pieces) <= id_:
            all_pieces.append(Piece(f"<no token {len(all_pieces)}>", 0.0, HIDDEN))
        if all_pieces[id_].text != text or all_pieces[id_].kind == HIDDEN:
            all_pieces[id_] = Piece(text, 0.0, CONTROL if own.special else NORMAL)
        places[text] = id_
        added[text] = own
    for text, own in _named(settings, layout):
        if text not in places:
            places[text] = len(all_pieces)
            all_pieces.append(Piece(text, 0.0, CONTROL))
        added.setdefault(text, own)
    check_texts(piece.text for piece in all_pieces)
    return Vocabulary(all_pieces, added=added)


def frame_of(vocabulary: Vocabulary, settings: Mapping[str, Any], layout: Layout) -> Frame:
    """The ids that the class puts round a text."""
    places = {piece.text: id_ for id_, piece in enumerate(vocabulary.pieces)}
    ids: dict[str, int | None] = {}
    for side, name in {"bos": layout.before, "eos": layout.after}.items():
        wanted = name is not None
        if layout.bos_default is not None:
            wanted = settings.get(f"add_{side}_token", side == "bos" and layout.bos_default)
        if not isinstance(wanted, bool):
            raise SourceError(f"tokenizer_config.json: add_{side}_token is {clip(wanted)}, wanted true or false")
        ids[side] = places[_text_of(name or side, settings, layout, places)] if wanted else None
    return Frame(ids["bos"], ids["eos"])


def token_text(name: str, settings: Mapping[str, Any], layout: Layout) -> str | None:
    """The text of `name`, as "unk_token", or None."""
    value = settings.get(name, layout.names.get(name))
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise SourceError(f"tokenizer_config.json: {name} is {clip(value)}, wanted a text")
    return text


def _text_of(name: str, settings: Mapping[str, Any], layout: Layout, places: dict[str, int]) -> str:
    key = "src_lang" if name == "language" else f"{name}_token"
    text = token_text(key, settings, layout)
    for spelled in (text, f"__{text}__"):  # M2M100 writes its languages so
        if spelled in places:
            return str(spelled)
    raise SourceError(f"tokenizer_config.json: {key} is {clip(text)}, which is no token")


def numbered_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[int, str, Added]]:
    """Added tokens whose ids are given, in their order."""
    found: dict[int, tuple[str, Added]] = {}
    pairs: list[tuple[Any, Any, Any]] = [(id_, text, {}) for text, id_ in settings.get("added_tokens", {}).items()]
    decoder = settings.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise SourceError(f"tokenizer_config.json: added_tokens_decoder is {clip(decoder)}, wanted a table")
    pairs += [(id_, token.get("content") if isinstance(token, dict) else None, token) for id_, token in decoder.items()]
    for key, text, token in pairs:
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        whole = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _MAX_ID
        if not whole or not isinstance(text, str) or not text:
            raise SourceError(f"added token {clip(key)} is {clip(text)}, wanted an id and a text")
        found[number] = (text, _flags(token))
    texts = [text for text, _ in found.values()]
    if len(set(texts)) != len(texts) or len(texts) > _MAX_ADDED:
        raise SourceError("added_tokens_decoder has two tokens with the same text")
    yield from ((id_, *found[id_]) for id_ in sorted(found))


def _named(settings: Mapping[str, Any], layout: Layout) -> Iterator[tuple[str, Added]]:
    """Special tokens that are named without an id."""
    values = [(name, settings.get(name, layout.names.get(name))) for name in _NAMES]
    for key in _LISTS:
        listed = settings.get(key, [])
        if isinstance(listed, dict):
            listed = list(listed.values())
        if not isinstance(listed, list):
            raise SourceError(f"tokenizer_config.json: {key} is {clip(listed)}, wanted a list")
        values += [(key, value) for value in listed]
    values.append((_MASK, settings.get(_MASK, layout.names.get(_MASK))))  # fairseq's comes last
    for name, value in values:
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str) or not text:
            raise SourceError(f"tokenizer_config.json: {name} is {clip(value)}, wanted a text")
        # A mask takes the space before it, unless its own table says otherwise.
        own = _flags(value) if isinstance(value, dict) else Added(lstrip=name == _MASK and "<" in text)
        yield text, Added(True, own.lstrip, own.rstrip, own.single_word)


def _flags(token: Any) -> Added:
    flags = {name: token.get(name, False) for name in _FLAGS}
    special = token.get("special", True)
    for name, value in (*flags.items(), ("special", special)):
        if not isinstance(value, bool):
            raise SourceError(f"tokenizer_config.json: {name} is {clip(value)}, wanted true or false")
    return Added(special, **flags)
