"""Tokenizer metadata of a GGUF file -> tokenizer.json.

Five kinds (llama.cpp's src/llama-vocab.cpp is what they mean): `gpt2`, byte-level BPE with a list of merges; `llama`,
SentencePiece BPE, whose merges follow from the scores; `gemma4`, the same with a list of merges; `t5`, SentencePiece
unigram; `bert`, WordPiece. The result adds nothing before or after a text: what a text starts and ends with is a fact
of the spec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip, near
from llmc.frontends.gguf.pretokenizers import PRE_TOKENIZERS
from llmc.frontends.tokenizers.check import check_texts, library_says
from llmc.frontends.tokenizers.pieces import (
    CONTROL,
    UNKNOWN,
    Piece,
    Rules,
    Vocabulary,
    add_special,
)
from llmc.frontends.tokenizers.pieces import (
    make_tokenizer as of_pieces,
)
from llmc.frontends.tokenizers.wordpiece import Cleaning, make_wordpiece, of_gguf

PREFIX = "tokenizer.ggml."
_TYPES = range(1, 7)  # as in pieces.py
_MAX_TOKEN = 1 << 10  # characters
_SPACE = "\u2581"  # SentencePiece's visible space

# Keys this file or gguf_spec.py reads, and keys that name ids nothing here uses.
_KEYS = frozenset(
    (
        "model", "pre", "tokens", "token_type", "merges", "scores", "add_bos_token",
        "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
        "precompiled_charsmap", "token_type_count",
        "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id",
        "padding_token_id", "seperator_token_id", "separator_token_id", "cls_token_id",
        "mask_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
        "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id",
        "fim_rep_token_id", "fim_sep_token_id",
    )
)  # fmt: skip
_OTHER_KEYS = frozenset(("tokenizer.chat_template", "tokenizer.chat_templates", "tokenizer.huggingface.json"))
_SEPARATORS = ("seperator_token_id", "separator_token_id")  # gguf.md spells it both ways
_NAMED_TEMPLATE = "tokenizer.chat_template."
_ENDS = ("add_eos_token", "add_sep_token")
_NOTHING_AFTER = (*_ENDS, "remove_extra_whitespaces")
# Kind -> keys that may only be false: a decoder's text ends with nothing. An encoder's ends with what the spec says.
_MUST_BE_FALSE: dict[str, tuple[str, ...]] = {
    "gpt2": _NOTHING_AFTER,
    "gemma4": _NOTHING_AFTER,
    "llama": _NOTHING_AFTER,
    "t5": (),
    "bert": (),
}


def adds_bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """Whether a text starts with bos when the file has no `add_bos_token`."""
    model, pre = metadata.get(f"{PREFIX}model"), metadata.get(f"{PREFIX}pre")
    if model in ("llama", "gemma4", "bert"):
        return True
    return isinstance(pre, str) and pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].add_bos


def ends_by_default(metadata: Mapping[str, Any]) -> int | None:
    """The id that a text ends with: where the kind or a key of the file says that it ends with one."""
    model = metadata.get(f"{PREFIX}model")
    for key, ids in (("add_sep_token", _SEPARATORS), ("add_eos_token", ("eos_token_id",))):
        default = model == ("bert" if key == "add_sep_token" else "t5")
        found = next((metadata[PREFIX + id_] for id_ in ids if PREFIX + id_ in metadata), None)
        if metadata.get(PREFIX + key, default) is True and isinstance(found, int):
            return found
    return None


def make_tokenizer(metadata: Mapping[str, Any]) -> bytes:
    """tokenizer.json. Raises SourceError naming the key that is missing, unknown or damaged."""
    _check_keys(metadata)
    model = metadata.get(f"{PREFIX}model")
    if not isinstance(model, str) or model not in _MODELS:
        raise SourceError(f"{PREFIX}model is {clip(model)}, llmc knows: {', '.join(_MODELS)}")
    tokens = _tokens(metadata)
    types = _types(metadata, len(tokens))
    with library_says(f"{PREFIX}*: no tokenizer can be made of it"):
        text: str = _MODELS[model](metadata, tokens, types).to_str()
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
    encoder = metadata.get(f"{metadata.get('general.architecture')}.attention.causal") is False
    for key in _MUST_BE_FALSE.get(str(metadata.get(f"{PREFIX}model")), ()):
        if encoder and key in _ENDS:
            continue
        value = metadata.get(PREFIX + key, False)
        if value is not False:
            raise SourceError(f"{PREFIX}{key} = {clip(value)}, llmc knows only false")


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise SourceError(f"{PREFIX}tokens is {clip(tokens)}, wanted a list of texts")
    # Like llama.cpp: an empty token cannot come from a text, it gets a name of its own.
    tokens = [token or f"[EMPTY_{id_}]" for id_, token in enumerate(tokens)]
    check_texts(tokens)
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
    add_special(tokenizer, Vocabulary([Piece(token, 0.0, kind) for token, kind in zip(tokens, types, strict=True)]))
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
    return _of_pieces("bpe", True, metadata, tokens, types)


def _unigram(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    return _of_pieces("unigram", False, metadata, tokens, types)


def _of_pieces(
    kind: str, byte_fallback: bool, metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> Tokenizer:
    scores = metadata.get(f"{PREFIX}scores")
    finite = isinstance(scores, list) and all(isinstance(score, float) and math.isfinite(score) for score in scores)
    if not isinstance(scores, list) or not finite or len(scores) != len(tokens):
        raise SourceError(f"{PREFIX}scores is {clip(scores)}, wanted {len(tokens)} finite numbers")
    flags = {}
    for key, default in (("add_space_prefix", True), ("remove_extra_whitespaces", False)):
        flags[key] = metadata.get(PREFIX + key, default)
        if not isinstance(flags[key], bool):
            raise SourceError(f"{PREFIX}{key} = {clip(flags[key])}, wanted a boolean")
    charsmap = metadata.get(f"{PREFIX}precompiled_charsmap", [])
    if not isinstance(charsmap, list) or not all(isinstance(n, int) and -128 <= n < 256 for n in charsmap):
        raise SourceError(f"{PREFIX}precompiled_charsmap is {clip(charsmap)}, wanted bytes")
    rules = Rules(
        kind,
        byte_fallback,
        bytes(n & 255 for n in charsmap),
        flags["add_space_prefix"],
        flags["remove_extra_whitespaces"],
    )
    pieces = [Piece(*piece) for piece in zip(tokens, scores, types, strict=True)]
    try:
        return of_pieces(Vocabulary(pieces), rules)
    except SourceError as error:
        raise SourceError(f"{PREFIX}tokens: {error}") from None


def _merged_pieces(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's tokens with merges of their own. Runs of newlines stand apart from all else."""
    if metadata.get(f"{PREFIX}add_space_prefix", False) is not False:
        raise SourceError(f"{PREFIX}add_space_prefix is set, llmc knows false for this kind")
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(BPE(vocab, _merges(metadata, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    add_special(tokenizer, Vocabulary([Piece(token, 0.0, kind) for token, kind in zip(tokens, types, strict=True)]))
    return tokenizer


def _wordpiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """llama.cpp lowers every text, and takes its accents off."""
    id_ = metadata.get(f"{PREFIX}unknown_token_id")
    if not isinstance(id_, int) or not 0 <= id_ < len(tokens):
        raise SourceError(f"{PREFIX}unknown_token_id is {clip(id_)}, wanted an id of a token")
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL)]
    return make_wordpiece(of_gguf(tokens, special), tokens[id_], special, Cleaning())


_Maker = Callable[[Mapping[str, Any], list[str], list[int]], Tokenizer]
_MODELS: dict[str, _Maker] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _merged_pieces,
    "t5": _unigram,
    "bert": _wordpiece,
}
