"""How a sentence-transformers folder makes one vector of a text: modules.json and the files it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import ModelSpec, Pooling
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import inside, read_bounded
from llmc.frontends.files.strict_json import read_json, read_list

MODULES = "modules.json"
LENGTH = "sentence_bert_config.json"
MAX_FILE = 1 << 20
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
}
_KINDS = ("Transformer", "Pooling", "Normalize")


def pooled(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with the folder's own pooling, where it has one and the model gives vectors.

    Raises SourceError for a module or a mode that llmc does not know.
    """
    if spec.pooling is None or not (folder / MODULES).exists():
        return spec
    modules = read_list(read_bounded(inside(folder, MODULES), MAX_FILE), MODULES)
    kinds = [str(module.get("type")).rsplit(".", 1)[-1] if isinstance(module, dict) else None for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise SourceError(f"{MODULES}: modules {clip(kinds)}, llmc knows {', '.join(_KINDS)}, in that order")
    mode, tokens = _mode(folder, str(modules[1].get("path"))), _tokens(folder, spec.sizes.context)
    return replace(spec, pooling=Pooling(mode, normalize="Normalize" in kinds, tokens=tokens))


def _tokens(folder: Path, context: int) -> int:
    """The longest text, 0 where the folder does not say or the model reads no longer one."""
    if not (folder / LENGTH).exists():
        return 0
    config: dict[str, Any] = read_json(read_bounded(inside(folder, LENGTH), MAX_FILE), LENGTH)
    if config.get("do_lower_case"):
        raise SourceError(f"{LENGTH}: do_lower_case is set: llmc leaves that to the tokenizer")
    length = config.get("max_seq_length")
    if length is None:
        return 0
    if type(length) is not int or length < 1:
        raise SourceError(f"{LENGTH}: max_seq_length = {clip(length)}, wanted a whole number from 1, or null")
    return length if length < context else 0


def _mode(folder: Path, path: str) -> str:
    name = f"{path}/config.json"
    config: dict[str, Any] = read_json(read_bounded(inside(inside(folder, path), "config.json"), MAX_FILE), name)
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(on) != 1 or on[0] not in _MODES:
        raise SourceError(f"{name}: {clip(on)} are on, llmc knows one of {', '.join(_MODES)}")
    return _MODES[on[0]]
