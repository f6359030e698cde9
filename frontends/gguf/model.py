"""A GGUF file, or its parts: metadata, tensors and tokenizer in one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc.compiler.errors import LlmcError, SourceError
from llmc.compiler.spec import LIMITS, ModelSpec
from llmc.frontends.binding import bind
from llmc.frontends.gguf.architectures import FACTORS
from llmc.frontends.gguf.encoder_decoder import never_used
from llmc.frontends.gguf.experts import guess_ahead
from llmc.frontends.gguf.file import GgufFile
from llmc.frontends.gguf.latent import STACKED
from llmc.frontends.gguf.scaled import with_scales
from llmc.frontends.gguf.spec import derive_spec
from llmc.frontends.gguf.split import model_stem, read_parts
from llmc.frontends.gguf.tokenizer import make_tokenizer, token_texts
from llmc.frontends.hf.text import check_template
from llmc.frontends.source import Source
from llmc.frontends.tensor import Tensor
from llmc.frontends.tokenizers.check import check_ids, check_tokenizer


def read_gguf_model(path: Path, spec: ModelSpec | None) -> Source:
    """Everything in the file that a compile needs. Raises SourceError naming what is wrong."""
    file = read_parts(path)
    try:
        return _read(file, path, spec)
    except LlmcError as error:
        if str(error).startswith(f"{path.name}: "):
            raise
        raise type(error)(f"{path.name}: {error}") from None


def _read(file: GgufFile, path: Path, spec: ModelSpec | None) -> Source:
    factors = {name: _vector(tensor) for name, tensor in file.tensors.items() if name in FACTORS}
    tensors = {name: _squared(tensor) for name, tensor in with_scales(file.listed | file.tensors).items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    spec = spec or derive_spec(file.metadata, shapes, model_stem(path), factors)
    tokenizer = check_tokenizer(make_tokenizer(file.metadata), "tokenizer.ggml.*")
    check_ids(tokenizer.vocab, spec.sizes.vocab, "tokenizer.ggml.tokens")
    unread = {*(factors if spec.scaling else ()), *guess_ahead(file.metadata, shapes), *never_used(shapes)}
    return Source(
        spec=spec,
        tensors=bind(spec, tensors, unread, {}, path.name),
        tokenizer_json=tokenizer.json,
        chat_template=_template(file.metadata),
        generation={},
        special_tokens=token_texts(file.metadata),
    )


# Numbers of dimensions of tensors that files have with a first dimension of 1, or without it.
_DIMS = {"ffn_gate_inp_shexp.weight": 2, "exp_probs_b.bias": 1}


def _squared(tensor: Tensor) -> Tensor:
    """The tensor with as many dimensions as it should have."""
    if tensor.name.endswith(STACKED) and len(tensor.shape) == 3:
        return replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))
    dims = next((dims for end, dims in _DIMS.items() if tensor.name.endswith(end)), None)
    rest = tensor.shape[-1:]
    if dims is None or tensor.shape not in (rest, (1, *rest)):
        return tensor
    return replace(tensor, shape=rest if dims == 1 else (1, *rest))


def _vector(tensor: Tensor) -> tuple[float, ...]:
    """The numbers of a small tensor."""
    if len(tensor.shape) != 1 or tensor.shape[0] > LIMITS["attention.head_dim"][1] or not tensor.readable:
        raise SourceError(f"{tensor.name} of shape {list(tensor.shape)}, stored as {tensor.stored}, wanted few numbers")
    return tuple(tensor.read().tolist())


def _template(metadata: dict[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is None:
        return None
    return check_template(template, "tokenizer.chat_template")
