"""A checkpoint of llama2.c: NAME.bin, and beside it tokenizer.bin or tokenizer.model.

https://github.com/karpathy/llama2.c: export.py writes it (`legacy_export`, `version1_export`), run.c gives it meaning.
The header is seven int32: width, MLP width, layers, heads, key-value heads, vocabulary, context; then float32 tensors.
Version 0 begins with it, and a negative vocabulary says that the head is not the embedding; version 1 begins with a
magic number and fills 256 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmc.compiler.errors import LlmcError, SourceError
from llmc.compiler.spec import ModelSpec, Tokens, range_fault, tensor_shapes
from llmc.frontends.assemble import assemble
from llmc.frontends.binding import bind
from llmc.frontends.files.mapped_file import MappedFile, open_mapped
from llmc.frontends.llama2c.tokenizer import BOS, EOS, read_tokenizer
from llmc.frontends.model_name import clean_name
from llmc.frontends.source import Source
from llmc.frontends.tensor import Tensor
from llmc.frontends.tokenizers.check import check_ids, check_tokenizer

MAGIC = 0x616B3432  # "ak42"
HEADER_BYTES = 256  # of version 1
_SIZES = struct.Struct("<7i")
_PATHS = (
    "sizes.hidden", "sizes.ffn", "sizes.layers", "attention.heads", "attention.kv_heads", "sizes.vocab",
    "sizes.context",
)  # fmt: skip
# What other formats begin with.
_OTHERS = {b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80\x02\x8a\n": "a pickle, as torch.save writes"}

# Our names -> those of llama2.c's model.py, which the file does not tell.
TENSORS = {
    "embedding": "tok_embeddings.weight",
    "layers.{layer}.attention_norm": "layers.{layer}.attention_norm.weight",
    "layers.{layer}.q": "layers.{layer}.attention.wq.weight",
    "layers.{layer}.k": "layers.{layer}.attention.wk.weight",
    "layers.{layer}.v": "layers.{layer}.attention.wv.weight",
    "layers.{layer}.o": "layers.{layer}.attention.wo.weight",
    "layers.{layer}.mlp_norm": "layers.{layer}.ffn_norm.weight",
    "layers.{layer}.gate": "layers.{layer}.feed_forward.w1.weight",
    "layers.{layer}.down": "layers.{layer}.feed_forward.w2.weight",
    "layers.{layer}.up": "layers.{layer}.feed_forward.w3.weight",
    "final_norm": "norm.weight",
    "head": "output.weight",
}
_ROPE = ""  # of version 0: cosines and sines of every position, which run.c skips too
_ATTENTION = tuple(f"layers.{{layer}}.{x}" for x in "qkvo")
_MLP = tuple(f"layers.{{layer}}.{x}" for x in ("gate", "down", "up"))
_NORMS = ("layers.{layer}.attention_norm", "layers.{layer}.mlp_norm")
# Version -> our names in the file's order; one of a layer stands for that of all layers.
ORDER = {
    0: ("embedding", _NORMS[0], *_ATTENTION, _NORMS[1], *_MLP, "final_norm", _ROPE, "head"),
    1: (*_NORMS, "final_norm", "embedding", *_ATTENTION, *_MLP, "head"),
}


@dataclass(frozen=True)
class _Header:
    version: int
    sizes: dict[str, int]  # field of the spec -> number
    tied: bool
    end: int  # where the tensors begin


def read_llama2c(path: Path, spec: ModelSpec | None) -> Source:
    """Everything in the two files that a compile needs. Raises SourceError naming what is wrong."""
    file = open_mapped(path, minimum=_SIZES.size)
    try:
        header = _read_header(file)
        own = _derive(header, clean_name(path.stem))
        found = _tensors(file, header, own)
    except LlmcError as error:
        if str(error).startswith(f"{path.name}: "):
            raise
        raise type(error)(f"{path.name}: {error}") from None
    label, data = read_tokenizer(path, own.sizes.vocab)
    tokenizer = check_tokenizer(data, label)
    check_ids(tokenizer.vocab, own.sizes.vocab, label)
    return Source(
        spec=spec or own,
        tensors=bind(spec or own, found, (), {}, path.name),
        tokenizer_json=tokenizer.json,
        chat_template=None,
        generation={},
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )


def _read_header(file: MappedFile) -> _Header:
    start = file.data[:4]
    if start in _OTHERS:
        raise SourceError(
            f"{file.name}: {_OTHERS[start]}; give the folder it is in, with config.json and tokenizer.json"
        )
    if int.from_bytes(start, "little") != MAGIC:
        numbers = _SIZES.unpack(file.data[: _SIZES.size])
        tied = numbers[5] > 0
        return _Header(0, _sizes(file, (*numbers[:5], abs(numbers[5]), numbers[6])), tied, _SIZES.size)
    head = bytes(file.bytes_at(0, HEADER_BYTES))
    version = int.from_bytes(head[4:8], "little")
    if version != 1:
        hint = " (its numbers are quantized)" if version == 2 else ""
        raise SourceError(f"{file.name}: llama2.c version {version}{hint}, llmc reads 0 and 1; export it as version 1")
    end = 8 + _SIZES.size
    if head[end] > 1 or any(head[end + 1 :]):
        raise SourceError(f"{file.name}: the header has more than version 1 knows; export the model again")
    return _Header(1, _sizes(file, _SIZES.unpack(head[8:end])), bool(head[end]), HEADER_BYTES)


def _sizes(file: MappedFile, numbers: tuple[int, ...]) -> dict[str, int]:
    sizes = dict(zip(_PATHS, numbers, strict=True))
    faults = [fault for path, value in sizes.items() if (fault := range_fault(path, value))]
    if not faults:
        hidden, heads = sizes["sizes.hidden"], sizes["attention.heads"]
        if hidden % heads or heads % sizes["attention.kv_heads"]:
            faults.append(
                f"{hidden} numbers for {heads} heads and {sizes['attention.kv_heads']} of keys, wanted whole shares"
            )
    if faults:
        raise SourceError(f"{file.name}: not a checkpoint of llama2.c, or damaged: {'; '.join(faults)}")
    return sizes


def _derive(header: _Header, name: str) -> ModelSpec:
    """The one model that run.c computes. It ends a text at `bos`, which parts the stories it was trained with."""
    head_dim = header.sizes["sizes.hidden"] // header.sizes["attention.heads"]
    settings = {
        **header.sizes,
        "norm.eps": 1e-5,
        "attention.head_dim": head_dim,
        "attention.scale": 1 / math.sqrt(head_dim),
        "position.layout": "interleaved",
        "mlp.activation": "silu",
        "head.tied": header.tied,
    }
    return assemble(name, settings, Tokens(BOS, (BOS, EOS), add_bos=True), TENSORS)


def _tensors(file: MappedFile, header: _Header, spec: ModelSpec) -> dict[str, Tensor]:
    """llama2.c's names -> tensors. The file is exactly as long as they are."""
    at = header.end
    tensors = {}
    shapes = tensor_shapes(spec)
    for ours, theirs in _names(header, spec):
        if ours == _ROPE:
            at += 4 * spec.sizes.context * spec.attention.head_dim
            continue
        nbytes = 4 * math.prod(shapes[ours])
        tensors[theirs] = Tensor(theirs, shapes[ours], "F32", at, nbytes, file)
        at += nbytes
    if at != file.size:
        raise SourceError(
            f"{file.name}: {file.size} bytes, wanted {at} for what its header says; "
            "it is cut short, damaged or not a checkpoint of llama2.c"
        )
    return tensors


def _names(header: _Header, spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """(our name, llama2.c's) of every tensor, in the file's order."""
    for ours in ORDER[header.version]:
        if ours == "head" and header.tied:
            continue
        theirs = TENSORS.get(ours, "")
        for layer in range(spec.sizes.layers) if "{layer}" in ours else [0]:
            yield ours.replace("{layer}", str(layer)), theirs.replace("{layer}", str(layer))
