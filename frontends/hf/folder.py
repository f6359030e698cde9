"""A Hugging Face folder: config.json, weights in one file or in shards, tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import ModelSpec, expand
from llmc.compiler.spec.fields import clip
from llmc.frontends.binding import bind
from llmc.frontends.files.mapped_file import inside, read_bounded
from llmc.frontends.files.safetensors_file import read_safetensors
from llmc.frontends.files.strict_json import read_json
from llmc.frontends.files.torch_file import read_torch
from llmc.frontends.hf import modelopt
from llmc.frontends.hf.config import derive_spec, family_of, named_as_saved
from llmc.frontends.hf.families import Family, known_families
from llmc.frontends.hf.pooling import pooled
from llmc.frontends.hf.quantization import KEY, packing_of
from llmc.frontends.hf.text import (
    MAX_TEMPLATE,
    chat_template,
    check_extra_tokens,
    generation_defaults,
    special_tokens,
)
from llmc.frontends.hf.translation import computed_places, languages, prefixes
from llmc.frontends.model_name import folder_name
from llmc.frontends.onnx_tensors import CodedTensor, onnx_files, read_onnx_tensors
from llmc.frontends.quantized.folded_tensor import FoldedTensor
from llmc.frontends.quantized.packing import Packing
from llmc.frontends.quantized.words import refuse_unsaid, zero_biases
from llmc.frontends.source import Source
from llmc.frontends.tensor import Tensor
from llmc.frontends.tensor_view import TensorView
from llmc.frontends.tokenizers.check import check_end, check_ids, check_tokenizer
from llmc.frontends.tokenizers.folder import read_settings, read_tokenizer

# Bytes of a file that is read whole, several times what the largest known model has.
MAX_CONFIG = 1 << 20
MAX_INDEX = 64 << 20
MAX_SHARDS = 4096

_Reader = Callable[[Path], dict[str, Tensor]]

# One file of weights, or else an index of shards, and what reads them; the first kind that is there is taken.
WEIGHTS: tuple[tuple[str, _Reader], ...] = (("model.safetensors", read_safetensors), ("pytorch_model.bin", read_torch))
INDEX = ".index.json"
_COMPARE_ROWS = 256  # of a table that is compared piece by piece


def read_folder(folder: Path, spec: ModelSpec | None, weights: Path | None = None) -> Source:
    """Everything in the folder that a compile needs. Raises SourceError naming what is wrong.

    `weights` is an ONNX file that has them, where the folder has none in another format, or more than one.
    """
    if not (folder / "config.json").exists() and spec is None:
        raise SourceError(f"{folder}: no config.json; give a Hugging Face folder or a GGUF file")
    generation = _json(folder, "generation_config.json", MAX_CONFIG)
    config = _json(folder, "config.json", MAX_CONFIG)
    tokenizer_json, file = read_tokenizer(folder, config)
    tokenizer = check_tokenizer(tokenizer_json, file)
    text = read_settings(folder)
    family = family_of(config) if spec is None or config.get("model_type") in known_families() else None
    derived = spec is None
    named = languages(family, tokenizer.json)
    if spec is None:
        bos = None if tokenizer.bos in named.values() else tokenizer.bos  # a source's language is for the user to say
        spec = derive_spec(config, generation, folder_name(folder), bos, tokenizer.end)
        spec = pooled(spec, folder)
    check_end(tokenizer, spec, file)
    check_ids(tokenizer.vocab, spec.sizes.vocab, file)
    check_extra_tokens(text, tokenizer.vocab)
    found = _folded(_read_weights(folder, weights, set(expand(spec).values())), _packing(folder, config), folder.name)
    if derived and family:
        spec = _with_own_head(named_as_saved(spec, family, found), family, found)
    skip = (
        _ignored(family, spec.sizes.layers)
        | _beyond(family, spec.sizes.layers, found)
        | _tied_copies(family, spec, found)
    )
    skip |= computed_places(spec, family, found)
    skip |= zero_biases(found, set(expand(spec).values()))
    template_file = folder / "chat_template.jinja"
    template = _text(folder, template_file.name) if template_file.exists() else None
    return Source(
        spec=spec,
        tensors=bind(spec, found, skip, {}, folder.name),
        tokenizer_json=tokenizer.json,
        chat_template=chat_template(text, template),
        generation=generation_defaults(generation),
        special_tokens=special_tokens(text, tokenizer.vocab),
        languages=named,
        prefixes=prefixes(config) if spec.encoder else {},
    )


def _packing(folder: Path, config: dict[str, Any]) -> Packing | None:
    faults: list[str] = []
    where = "config.json"
    if KEY not in config and (folder / modelopt.FILE).exists():
        where = modelopt.FILE
        config = config | {KEY: modelopt.as_in_config(_json(folder, modelopt.FILE, MAX_CONFIG), faults)}
    packing = packing_of(config, faults)
    if faults:
        raise SourceError(f"{where}: {'; '.join(faults)}")
    return packing


def _folded(found: dict[str, Tensor], packing: Packing | None, where: str) -> dict[str, Tensor]:
    """The file's tensors, with one in place of those that together are a quantized matrix."""
    if packing is None:
        refuse_unsaid(found, where, KEY)
        return found
    return packing.fold(found, where)


def _json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    """The object in a file of the folder, {} when there is no such file."""
    if not (folder / name).exists():
        return {}
    return read_json(read_bounded(inside(folder, name), limit), name)


def _text(folder: Path, name: str) -> str:
    data = read_bounded(inside(folder, name), 4 * MAX_TEMPLATE)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise SourceError(f"{name}: not UTF-8 text") from None


def _read_weights(folder: Path, onnx: Path | None, wanted: set[str]) -> dict[str, Tensor]:
    """The file's names -> tensors, of one file or of all shards of the index.

    Those of ONNX files begin as most of `wanted` do.
    """
    if onnx is not None:
        return read_onnx_tensors([inside(folder, onnx.name)], wanted)
    for whole, read in WEIGHTS:
        if (folder / (whole + INDEX)).exists():
            return _read_shards(folder, whole, read)
        if (folder / whole).exists():
            return read(inside(folder, whole))
    if names := onnx_files(folder):
        return read_onnx_tensors([inside(folder, name) for name in names], wanted)
    known = ", ".join(whole for whole, _ in WEIGHTS)
    raise SourceError(
        f"{folder.name}: no {known} or model.onnx, nor an index of its shards; convert other weights with "
        "transformers' save_pretrained"
    )


def _read_shards(folder: Path, whole: str, read: _Reader) -> dict[str, Tensor]:
    """The tensors of all shards; the one file beside their index is either the only shard or another model."""
    index = whole + INDEX
    places = _json(folder, index, MAX_INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise SourceError(f"{index}: weight_map is {clip(places)}, wanted tensor name -> file name")
    shards = sorted(set(places.values()))
    if len(shards) > MAX_SHARDS:
        raise SourceError(f"{index}: {len(shards)} shards, wanted at most {MAX_SHARDS}")
    if (folder / whole).exists() and shards != [whole]:
        raise SourceError(f"{folder.name}: both {whole} and {index}; remove the stale one")
    paths = {shard: inside(folder, shard) for shard in shards}
    if absent := [shard for shard, path in paths.items() if not path.exists()]:
        raise SourceError(f"{index}: shards {clip(absent)} of {len(shards)} are not in the folder; fetch them")
    tensors: dict[str, Tensor] = {}
    faults = []
    for shard, path in paths.items():
        for name, tensor in read(path).items():
            if places.get(name) != shard:
                faults.append(f"{clip(name)} is in {shard}, not in {clip(places.get(name))}")
            tensors[name] = tensor
    faults += [f"{clip(name)} is in no shard" for name in places if name not in tensors]
    if faults:
        more = f" and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise SourceError(f"{index} does not fit its shards: {'; '.join(faults[:10])}{more}")
    return tensors


def _ignored(family: Family | None, layers: int) -> set[str]:
    """The family's tensors that mean nothing, by their names in files with and without its stem."""
    if family is None:
        return set()
    names = {name.replace("{layer}", str(layer)) for name in family.ignored for layer in range(layers)}
    return names | {name.removeprefix(family.stem) for name in names}


def _beyond(family: Family | None, layers: int, found: dict[str, Tensor]) -> set[str]:
    """The file's names in the family's layers after the last one, which predict what follows the next token."""
    after = [family.layers.replace("{layer}", str(layers + i)) for i in range(family.beyond)] if family else []
    return {name for name in found if name.startswith(tuple(after))}


def _tied_copies(family: Family | None, spec: ModelSpec, found: dict[str, Tensor]) -> set[str]:
    """The head that some checkpoints save though it is tied, and the like: ignorable if they are the embedding."""
    names = {*family.copies, family.head_name()} if family else {"lm_head.weight"}
    named = expand(spec)
    embedding = found.get(named["embedding"])
    if embedding is None:
        return set()
    return {name for name in names & set(found) - set(named.values()) if _same(embedding, found[name])}


def _with_own_head(spec: ModelSpec, family: Family, found: dict[str, Tensor]) -> ModelSpec:
    """The spec for a file with a head that is not the embedding, where the family's config does not say."""
    name = family.head_name()
    embedding, head = found.get(expand(spec)["embedding"]), found.get(name)
    if not (family.own_head and spec.head.tied and embedding and head) or _same(embedding, head):
        return spec
    return replace(spec, head=replace(spec.head, tied=False), tensors=spec.tensors | {"head": name})


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.stored != b.stored or not a.shape or isinstance(a, FoldedTensor):
        return False
    rows = a.shape[0] if len(a.shape) > 1 else 1
    pieces = [(at, min(at + _COMPARE_ROWS, rows)) for at in range(0, rows, _COMPARE_ROWS)]
    if isinstance(a, (CodedTensor, TensorView)) or isinstance(b, (CodedTensor, TensorView)):
        return all(np.array_equal(a.read_rows(*piece), b.read_rows(*piece)) for piece in pieces)
    return all(np.array_equal(a.raw_rows(*piece), b.raw_rows(*piece)) for piece in pieces)
