"""The tokenizer of a Hugging Face folder, from whichever of the usual files it has.

tokenizer.json is taken as it is. Else it is made: from a SentencePiece model, from vocab.json and merges.txt, or from
vocab.txt, with what tokenizer_config.json, special_tokens_map.json and added_tokens.json say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc.compiler.errors import LlmcError, SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import inside, read_bounded
from llmc.frontends.files.strict_json import read_json
from llmc.frontends.tokenizers.check import library_says
from llmc.frontends.tokenizers.layouts import CLASS_OF, MERGES, SENTENCEPIECE, WITH_VOCAB, WORDPIECE, Layout
from llmc.frontends.tokenizers.sentencepiece_folder import of_sentencepiece, of_vocab
from llmc.frontends.tokenizers.sentencepiece_model import read_model
from llmc.frontends.tokenizers.vocab_files import of_merges, of_words

MAX_TOKENIZER = 128 << 20
MAX_SETTINGS = 16 << 20
_WHOLE = "tokenizer.json"
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
_SOURCE = "source.spm"  # of Marian's two; the other cuts what it learns from
# Everything that a folder's tokenizer may be made of.
FILES = (_WHOLE, *_SETTINGS, "added_tokens.json", *_MODELS, _SOURCE, "vocab.json", "merges.txt", "vocab.txt")
_REFUSED = {"sp_model_kwargs": ({}, None), "separate_vocabs": (False, None), "split_special_tokens": (False, None)}


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, and beside a tokenizer.json no more; else with what only older files say."""
    settings: dict[str, Any] = {}
    whole = (folder / _WHOLE).exists()
    for name in _SETTINGS[whole:]:
        settings |= {key: value for key, value in _json(folder, name).items() if value is not None}
    if not whole and (added := _json(folder, "added_tokens.json")):
        settings["added_tokens"] = added
    return settings


def read_tokenizer(folder: Path, config: Mapping[str, Any]) -> tuple[bytes, str]:
    """tokenizer.json, and the name of the file it comes from. Raises SourceError naming what is not understood."""
    if (folder / _WHOLE).exists():
        return read_bounded(inside(folder, _WHOLE), MAX_TOKENIZER), _WHOLE
    settings = read_settings(folder)
    name = _main_file(folder)
    try:
        faults = [f"{key} = {clip(settings[key])}" for key, known in _REFUSED.items() if settings.get(key) not in known]
        if faults:
            raise SourceError(f"tokenizer_config.json has {'; '.join(faults)}, which llmc does not know")
        with library_says("no tokenizer can be made of it"):
            return _make(folder, name, settings, config), name
    except LlmcError as error:
        raise SourceError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None


def _main_file(folder: Path) -> str:
    found = [name for name in (_SOURCE, *_MODELS) if (folder / name).exists()]
    if len(found) > 1:
        raise SourceError(f"{folder.name}: {' and '.join(found)}: which of them is the tokenizer? Remove the others")
    if found:
        return found[0]
    if (folder / "merges.txt").exists() and (folder / "vocab.json").exists():
        return "merges.txt"
    if (folder / "vocab.txt").exists():
        return "vocab.txt"
    raise SourceError(
        f"{folder.name}: no tokenizer.json, nor {', '.join(_MODELS)}, source.spm, vocab.json with merges.txt or "
        "vocab.txt; write it with transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _make(folder: Path, name: str, settings: dict[str, Any], config: Mapping[str, Any]) -> bytes:
    if name == "vocab.txt":
        layout = _layout(settings, config, WORDPIECE, "BertTokenizer")
        return of_words(_text(folder, name), settings, layout)
    if name == "merges.txt":
        layout = _layout(settings, config, MERGES, None)
        return of_merges(_json(folder, "vocab.json", MAX_TOKENIZER), _text(folder, name), settings, layout)
    model = read_model(read_bounded(inside(folder, name), MAX_TOKENIZER))
    if name == _SOURCE or (folder / "vocab.json").exists():
        layout = _layout(settings, config, WITH_VOCAB, "MarianTokenizer" if name == _SOURCE else None)
        return of_vocab(model, _json(folder, "vocab.json", MAX_TOKENIZER), settings, layout)
    return of_sentencepiece(model, settings, _layout(settings, config, SENTENCEPIECE, None))


def _layout(
    settings: dict[str, Any], config: Mapping[str, Any], table: dict[str, Layout], default: str | None
) -> Layout:
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    found = named or CLASS_OF.get(str(config.get("model_type")), default)
    name = str(found).removesuffix("Fast")
    if name not in table:
        origin = "tokenizer_class" if named else "no tokenizer_class, and model_type"
        shown = named or config.get("model_type")
        raise SourceError(
            f"{origin} is {clip(shown)}, llmc knows of this kind: {', '.join(table)}; write tokenizer.json with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return table[name]


def _json(folder: Path, name: str, limit: int = MAX_SETTINGS) -> dict[str, Any]:
    """The object in a file of the folder, {} when there is no such file."""
    if not (folder / name).exists():
        return {}
    return read_json(read_bounded(inside(folder, name), limit), name)


def _text(folder: Path, name: str) -> str:
    try:
        return read_bounded(inside(folder, name), MAX_TOKENIZER).decode("utf-8")
    except UnicodeDecodeError:
        raise SourceError(f"{name}: not UTF-8 text") from None
