"""What a Hugging Face folder says about answers to a source: how they begin, languages, words before the source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.compiler.spec import EOS_LIMIT, ModelSpec, Tokens
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.strict_json import read_json
from llmc.frontends.graph.sinusoid import sinusoidal_table
from llmc.frontends.hf.families import Family
from llmc.frontends.tensor import Tensor

TOKEN_KEYS = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids", "suppress_tokens")
_TASK = re.compile(r"translation_([a-z]{2,3})_to_([a-z]{2,3})")
_MAX_PREFIX = 200  # characters
_MORE_ROWS = 8  # of a table of places, before the first one and for padding
_ROUNDED = 5e-3  # what bfloat16 makes of sines


def answer_tokens(
    tokens: Tokens, config: Mapping[str, Any], generation: Mapping[str, Any], vocab: int | None, faults: list[str]
) -> Tokens:
    """How an answer begins, and what it never has: as generation_config.json says, or else config.json."""
    values = {}
    for key in TOKEN_KEYS:
        told = [table[key] for table in (generation, config) if table.get(key) is not None]
        values[key] = told[0] if told else None
    for key in TOKEN_KEYS[:2]:
        if values[key] is not None and not _is_id(values[key], vocab):
            faults.append(f"{key} = {clip(values[key])}, wanted a token id below vocab_size = {vocab}")
            values[key] = 0
    start, forced, words, suppressed = values.values()
    start = tokens.bos if start is None else start
    if start is None:
        faults.append("missing key decoder_start_token_id")
    never = [word[0] for word in _lists(words) if len(word) == 1] + (suppressed if isinstance(suppressed, list) else [])
    if not all(_is_id(token, vocab) for token in never) or len(never) > EOS_LIMIT:
        faults.append(f"bad_words_ids and suppress_tokens = {clip(never)}, wanted at most {EOS_LIMIT} token ids")
        never = []
    return replace(
        tokens, start=start, forced=() if forced is None else (forced,), suppressed=tuple(dict.fromkeys(never))
    )


def _lists(words: Any) -> list[list[Any]]:
    return [word for word in words if isinstance(word, list)] if isinstance(words, list) else []


def _is_id(value: Any, vocab: int | None) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 <= value < (1 << 63 if vocab is None else vocab)


def languages(family: Family | None, tokenizer_json: bytes) -> dict[str, int]:
    """Names of languages -> ids of the special tokens that stand for them, {} for a model that has none."""
    if family is None or not family.languages:
        return {}
    found = {}
    for token in read_json(tokenizer_json, "tokenizer.json").get("added_tokens") or []:
        for pattern in family.languages if token.get("special") else ():
            if named := re.fullmatch(pattern, str(token.get("content"))):
                found[named[1]] = int(token["id"])
    return found


def computed_places(spec: ModelSpec, family: Family | None, found: Mapping[str, Tensor]) -> set[str]:
    """Tables of places in the file that are what the spec computes: ignorable, where others would be left unread."""
    names = {*family.sines, *(name.removeprefix(family.stem) for name in family.sines)} if family else set()
    return {name for name in names & set(found) if _holds_sines(spec, found[name])}


def _holds_sines(spec: ModelSpec, tensor: Tensor) -> bool:
    rows, *rest = tensor.shape
    if spec.position.kind != "sinusoidal" or rest != [spec.sizes.hidden] or rows > spec.sizes.context + _MORE_ROWS:
        return False
    values = tensor.read()
    written = values.any(axis=1)  # the row of padding may be zeros
    return bool(np.allclose(values[written], sinusoidal_table(spec, rows)[written], atol=_ROUNDED, rtol=0))


def prefixes(config: Mapping[str, Any]) -> dict[str, str]:
    """ "en to de" -> what the model was taught to find before such a source."""
    tasks = config.get("task_specific_params")
    found = {}
    for task, settings in tasks.items() if isinstance(tasks, dict) else ():
        prefix = settings.get("prefix") if isinstance(settings, dict) else None
        named = _TASK.fullmatch(task)
        if named and isinstance(prefix, str) and len(prefix) <= _MAX_PREFIX and prefix.isprintable():
            found[f"{named[1]} to {named[2]}"] = prefix
    return found
