"""Tokenizer metadata of a GGUF file -> tokenizer.json.

Two kinds (llama.cpp's src/llama-vocab.cpp is what they mean): `gpt2`, byte-level BPE with a list of
merges, and `llama`, SentencePiece BPE, whose merges follow from the scores. The result adds nothing
before or after a text: whether it starts with a bos is a fact of the spec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip, near
from llmc.frontends.gguf.pretokenizers import PRE_TOKENIZERS

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # of token_type (gguf.md); 5 is unused
_TYPES = range(1, 7)
_MAX_TOKEN = 1 << 10  # characters
_MAX_PIECE = 1 << 8  # characters of a SentencePiece token, each of whose cuts is looked at
_SPACE = "\u2581"  # SentencePiece's visible space

# Keys this file or gguf_spec.py reads, and keys that name ids nothing here uses.
_KEYS = frozenset(
    (
        "model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token",
        "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
        "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id",
        "padding_token_id", "seperator_token_id", "separator_token_id", "cls_token_id",
        "mask_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
        "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id",
        "fim_rep_token_id", "fim_sep_token_id",
    )
)  # fmt: skip
_OTHER_KEYS = frozenset(("tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.huggingface.json"))
_NAMED_TEMPLATE = "tokenizer.chat_template."
_MUST_BE_FALSE = ("add_eos_token", "add_sep_token", "remove_extra_whitespaces")


def adds_bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """Whether a text starts with bos when the file has no `add_bos_token`."""
    model, pre = metadata.get(f"{PREFIX}model"), metadata.get(f"{PREFIX}pre")
    if model == "llama":
        return True
    return isinstance(pre, str) and pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].add_bos


def make_tokenizer(metadata: Mapping[str, Any]) -> bytes:
    """tokenizer.json. Raises SourceError naming the key that is missing, unknown or damaged."""
    _check_keys(metadata)
    model = metadata.get(f"{PREFIX}model")
    if not isinstance(model, str) or model not in _MODELS:
        raise SourceError(f"{PREFIX}model is {clip(model)}, llmc knows: {', '.join(_MODELS)}")
    tokens = _tokens(metadata)
    types = _types(metadata, len(tokens))
    try:
        tokenizer = _MODELS[model](metadata, tokens, types)
        _add_special(tokenizer, tokens, types)
        text: str = tokenizer.to_str()
    except (SourceError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not of class Exception
        raise SourceError(f"{PREFIX}*: no tokenizer can be made of it: {clip(str(error))}") from None
    return text.encode()


def token_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token -> their texts, those that the file names."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = metadata.get(f"{PREFIX}tokens", [])
    texts = {}
    for short, key in keys.items():
        id_ = metadata.get(f"{PREFIX}{key}_token_id")
        if isinstance(id_, int) and not isinstance(id_, bool) and 0 <= id_ < len(tokens):
            texts[f"{short}_token"] = tokens[id_]
    return texts


def _check_keys(metadata: Mapping[str, Any]) -> None:
    known = {PREFIX + key for key in _KEYS} | _OTHER_KEYS
    unknown = [
        near(key, known)
        for key in metadata
        if key.startswith("tokenizer.") and key not in known and not key.startswith(_NAMED_TEMPLATE)
    ]
    if unknown:
        raise SourceError(f"unknown keys {', '.join(unknown)}")
    for key in _MUST_BE_FALSE:
        value = metadata.get(PREFIX + key, False)
        if value is not False:
            raise SourceError(f"{PREFIX}{key} = {clip(value)}, llmc knows only false")


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise SourceError(f"{PREFIX}tokens is {clip(tokens)}, wanted a list of texts")
    # Like llama.cpp: an empty token cannot come from a text, it gets a name of its own.
    tokens = [token or f"[EMPTY_{id_}]" for id_, token in enumerate(tokens)]
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN:
        raise SourceError(f"{PREFIX}tokens: one of {longest} characters, wanted {_MAX_TOKEN} at most")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, n in Counter(tokens).items() if n > 1)
        raise SourceError(f"{PREFIX}tokens: {clip(twice)} appears twice")
    return tokens


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    types = metadata.get(f"{PREFIX}token_type")
    if not isinstance(types, list) or len(types) != count or not all(t in _TYPES for t in types):
        raise SourceError(f"{PREFIX}token_type is {clip(types)}, wanted {count} numbers from 1 to 6")
    return types


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    pre = metadata.get(f"{PREFIX}pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise SourceError(
            f"{PREFIX}pre is {clip(pre)}, llmc knows: {', '.join(PRE_TOKENIZERS)}; "
            "convert the model again, or use its Hugging Face folder"
        )
    if metadata.get(f"{PREFIX}add_space_prefix", False) is not False:
        raise SourceError(f"{PREFIX}add_space_prefix is set, llmc knows false for byte-level BPE")
    rule = PRE_TOKENIZERS[pre]
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    model = BPE(vocab, _merges(metadata, vocab), ignore_merges=rule.ignore_merges)
    tokenizer = Tokenizer(model)
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in rule.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(metadata: Mapping[str, Any], vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = metadata.get(f"{PREFIX}merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise SourceError(f"{PREFIX}merges is {clip(merges)}, wanted a list of texts")
    pairs = []
    for merge in merges:
        # A part may itself begin with a space, so the separator is looked for behind it.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise SourceError(f"{PREFIX}merges: {clip(merge)} does not join two tokens to a third; the file is damaged")
        pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.get(f"{PREFIX}scores")
    finite = isinstance(scores, list) and all(isinstance(score, float) and math.isfinite(score) for score in scores)
    if not isinstance(scores, list) or not finite or len(scores) != len(tokens):
        raise SourceError(f"{PREFIX}scores is {clip(scores)}, wanted {len(tokens)} finite numbers")
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    absent = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if absent:
        raise SourceError(f"{PREFIX}tokens lacks {len(absent)} byte tokens, first {absent[0]}")
    prefix = metadata.get(f"{PREFIX}add_space_prefix", True)
    if not isinstance(prefix, bool):
        raise SourceError(f"{PREFIX}add_space_prefix = {clip(prefix)}, wanted a boolean")
    unknown = next((tokens[id_] for id_, kind in enumerate(types) if kind == UNKNOWN), None)
    model = BPE(
        vocab,
        _merges_of_scores(vocab, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    # As transformers' converter of Llama's SentencePiece model (convert_slow_tokenizer.py).
    spaces = normalizers.Replace(" ", _SPACE)
    first = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, spaces])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _merges_of_scores(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, the best score of the third first.

    Tokens that stand for no text are never the result: no text that spells one becomes it.
    """
    ranked = []
    for token, id_ in vocab.items():
        if types[id_] in (UNKNOWN, CONTROL, BYTE):
            continue
        for cut in range(1, len(token) if len(token) <= _MAX_PIECE else 0):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[id_], id_, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special (left out of decoded text), user-defined ones are not."""
    control, defined = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (UNKNOWN, CONTROL):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False))
    # In two calls: each one rebuilds the library's search tree, and some vocabularies have thousands.
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)
    for id_, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and tokenizer.token_to_id(token) != id_:
            raise SourceError(f"{PREFIX}tokens: {clip(token)} cannot be given its id {id_}")


_Maker = Callable[[Mapping[str, Any], list[str], list[int]], Tokenizer]
_MODELS: dict[str, _Maker] = {"gpt2": _byte_level, "llama": _sentencepiece}
