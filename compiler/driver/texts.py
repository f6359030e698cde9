"""Texts to measure on, as windows of token ids; of a model with an encoder, as the sources it answers to."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from llmc.compiler.errors import LlmcError
from llmc.compiler.text_file import read_text
from llmc.runtime.text.tokenizer import Tokenizer

SAMPLE_TOKENS = 256  # of a sample of ours, for what is measured when no text is given
SCALING_TEXTS = 2  # of so many tokens together
SOURCE_TOKENS = 64  # of one line, at most
CALIBRATION_WINDOW = 512  # tokens
CALIBRATION_WINDOWS = 16


def sample_window(model: Any) -> list[int]:
    """The first tokens of a short text of ours: prose, dialogue, code, numbers, other languages."""
    return _window(model, _sample())


def scaling_windows(model: Any) -> list[list[int]]:
    """Parts of another one, each by itself, to choose scales by what is not measured on."""
    paragraphs = _sample("sample_scaling.txt").split("\n\n")
    step = -(-len(paragraphs) // SCALING_TEXTS)
    parts = ["\n\n".join(paragraphs[at : at + step]) for at in range(0, len(paragraphs), step)]
    return [_window(model, part, SAMPLE_TOKENS // SCALING_TEXTS) for part in parts]


def _window(model: Any, text: str, tokens: int = SAMPLE_TOKENS) -> list[int]:
    return _ids(model, text)[: min(tokens, model.spec.sizes.context)]


def sample_sources(model: Any) -> list[list[int]]:
    """The lines of that text, each as the encoder wants a source in the first of its languages."""
    tokens, size = model.spec.tokens, min(SOURCE_TOKENS, model.spec.sizes.context)
    tokenizer = Tokenizer(model.tokenizer_json)
    first = list(model.languages.values())[:1] or ([tokens.bos] if tokens.add_bos else [])
    last = [] if tokens.end is None else [tokens.end]
    texts = [tokenizer.encode(line.strip()) for line in _sample().splitlines() if line.strip()]
    return [[*first, *ids[: size - len(first) - len(last)], *last] for ids in texts]


def answer_lead(model: Any) -> list[int]:
    """What an answer begins with: into what the model is made for, or into the first of its languages."""
    tokens = model.spec.tokens
    return [tokens.start, *(tokens.forced or list(model.languages.values())[:1])]


def _sample(name: str = "sample.txt") -> str:
    return files("llmc.compiler.driver").joinpath(name).read_text(encoding="utf-8")


def calibration_windows(model: Any, path: Path, seed: int) -> list[list[int]]:
    """Windows of a text file, chosen by the seed. Raises LlmcError for a text that is no text or too short."""
    text = read_text(path, "the calibration text")
    size = min(CALIBRATION_WINDOW, model.spec.sizes.context)
    ids = _ids(model, text)
    count = len(ids) // size
    if count == 0:
        raise LlmcError(f"{path}: {len(ids)} tokens, wanted at least {size} to calibrate on; give a longer text")
    chosen = np.random.default_rng(seed).permutation(count)[:CALIBRATION_WINDOWS]
    first = [model.spec.tokens.bos] if model.spec.tokens.add_bos else []
    return [[*first, *ids[i * size : (i + 1) * size - len(first)]] for i in sorted(chosen.tolist())]


def _ids(model: Any, text: str) -> list[int]:
    tokens = model.spec.tokens
    ids = Tokenizer(model.tokenizer_json, bos=tokens.bos).encode(text, bos=tokens.add_bos)
    return [i for i in ids if i < model.spec.sizes.vocab]
