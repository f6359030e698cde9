"""Checks a tokenizer.json: it loads, its ids fit the model, it adds at most one id before a text and one after."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import ModelSpec
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.strict_json import read_json

_PROBE = "a"


@dataclass(frozen=True)
class CheckedTokenizer:
    """`json`: tokenizer.json for the artifact. `bos` and `end`: the ids it puts before and after a text, or None."""

    json: bytes
    bos: int | None
    end: int | None
    vocab: dict[str, int]  # every token, the added ones too


@contextmanager
def library_says(problem: str) -> Iterator[None]:
    """Turns what the library refuses into SourceError; any other mistake goes on."""
    try:
        yield
    except BaseException as error:
        # The library raises plain Exception, and its panics are not even that.
        panic = not isinstance(error, (Exception, KeyboardInterrupt, SystemExit))
        if type(error) is not Exception and not panic:
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"{problem}: {clip(reason)}") from None


def check_texts(texts: Iterable[str]) -> None:
    """Raises SourceError when one of the texts cannot be written, as JSON's lone surrogates."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SourceError(f"token {clip(text)} is no text: it has a lone surrogate") from None


def load_tokenizer(data: bytes, label: str) -> Tokenizer:
    """The tokenizer in `data`. Raises SourceError when the library refuses it."""
    with library_says(f"{label}: not a tokenizer"):
        try:
            return Tokenizer.from_buffer(data)
        except ValueError as error:  # from its JSON reader
            raise Exception(str(error)) from None


def check_tokenizer(data: bytes, label: str) -> CheckedTokenizer:
    """Loads and probes a tokenizer.json. Raises SourceError naming what is wrong.

    Padding and truncation, which would silently change a prompt, are taken out.
    """
    table = read_json(data, label)
    _check_merges(table.get("model"), label)
    added = _added_tokens(table, label)
    tokenizer = load_tokenizer(data, label)
    for content, id_ in added.items():
        # The library gives a token another id than the file says, rather than leave a hole.
        if tokenizer.token_to_id(content) != id_:
            raise SourceError(
                f"{label}: added token {clip(content)} has id {clip(id_)}, but the tokenizer gives "
                f"it {tokenizer.token_to_id(content)}; save the tokenizer again with transformers"
            )
    known = _unknown_from(table, label)
    if tokenizer.padding is not None or tokenizer.truncation is not None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        data = tokenizer.to_str().encode()
        table = read_json(data, label)
    data = _soon_read(table, data)
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if known is not None:
        vocab = {token: id_ for token, id_ in vocab.items() if id_ < known}
    if not vocab:
        raise SourceError(f"{label}: the vocabulary is empty")
    if len(set(vocab.values())) != len(vocab):
        raise SourceError(f"{label}: two tokens have the same id")
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole = tokenizer.encode(_PROBE, add_special_tokens=True).ids
    count = len(plain)
    for before, after in ((0, 0), (1, 0), (0, 1), (1, 1)):
        if len(whole) == before + count + after and whole[before : before + count] == plain:
            return CheckedTokenizer(data, whole[0] if before else None, whole[-1] if after else None, vocab)
    raise SourceError(
        f"{label}: adds ids round a text ({clip(whole)} for {clip(plain)}), wanted at most one before it and one "
        "after; remove the rest from its post_processor"
    )


def check_end(tokenizer: CheckedTokenizer, spec: ModelSpec, label: str) -> None:
    """Raises SourceError when an id would stand between a decoder's text and what it is to go on with."""
    if tokenizer.end is not None and spec.attention.causal and not spec.pooling and not spec.encoder:
        raise SourceError(
            f"{label}: adds ids round a text (id {tokenizer.end} after it), wanted at most one before it; remove the "
            "rest from its post_processor"
        )


def check_ids(vocab: dict[str, int], size: int, label: str) -> None:
    """Raises SourceError when a token has an id that the model's embedding of `size` rows lacks."""
    over = sorted((id_, token) for token, id_ in vocab.items() if not 0 <= id_ < size)
    if over:
        raise SourceError(
            f"{label}: {len(over)} tokens have ids beyond the model's vocabulary of {size}, first "
            f"{clip(over[0][1])} = {over[0][0]}; remove them or use the tokenizer of this model"
        )


def _check_merges(model: Any, label: str) -> None:
    """Refuses merges that would end in the library's depths: it joins two tokens before it looks for the third.

    Where the model has a continuing_subword_prefix, the library takes as many bytes off the second token, unseen.
    """
    vocab, merges = (model.get(key) for key in ("vocab", "merges")) if isinstance(model, dict) else (None, None)
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        return
    prefix = str(model.get("continuing_subword_prefix") or "")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(token, str) for token in pair):
            continue  # the library says what is wrong with it
        if not pair[1].startswith(prefix):
            raise SourceError(
                f"{label}: merge {clip(merge)}: its second token does not begin with the model's "
                f"continuing_subword_prefix {clip(prefix)}"
            )
        if pair[0] + pair[1].removeprefix(prefix) not in vocab:
            raise SourceError(f"{label}: merge {clip(merge)} does not make a token of the vocabulary")


def _soon_read(table: dict[str, Any], data: bytes) -> bytes:
    """`data`, or the same tokenizer written so that the library reads it in 0.6 to 0.8 of the time.

    It puts the vocabulary into a sorted tree, whose nodes it searches from their start: in descending order that is
    where each token goes.
    """
    model = table.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(vocab, dict):
        return data
    sooner = {**model, "vocab": dict(sorted(vocab.items(), reverse=True))}
    if isinstance(merges := model.get("merges"), list):
        sooner["merges"] = _short(merges)
    return json.dumps({**table, "model": sooner}, ensure_ascii=False, separators=(",", ":")).encode()


def _short(merges: list[Any]) -> list[Any]:
    """Each merge as one text, "a b", if they are pairs that can be written so.

    A token with a space could not be told from two, and the library takes "#version" for the start of a comment.
    """
    if not all(map(_is_pair, merges)):
        return merges
    texts = [" ".join(merge) for merge in merges]
    return merges if any(text.count(" ") != 1 or text.startswith("#version") for text in texts) else texts


def _is_pair(merge: object) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and all(isinstance(token, str) for token in merge)


def _unknown_from(table: dict[str, Any], label: str) -> int | None:
    """The first id that the runtime takes for the unknown token (pieces.py), or None."""
    model = table.get("model")
    first = model.get("unknown_from") if isinstance(model, dict) else None
    if first is not None and (not isinstance(first, int) or isinstance(first, bool) or first < 1):
        raise SourceError(f"{label}: model.unknown_from is {clip(first)}, wanted an id")
    return first


def _added_tokens(table: dict[str, Any], label: str) -> dict[str, Any]:
    """Content -> id of the added tokens, each of which must be there once."""
    added = table.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise SourceError(f"{label}: added_tokens is {clip(added)}, wanted a list of tables")
    for key in ("content", "id"):
        values = [repr(token.get(key)) for token in added]
        if len(set(values)) != len(values):
            raise SourceError(f"{label}: added_tokens has two entries with the same {key}")
    return {str(token.get("content")): token.get("id") for token in added}
