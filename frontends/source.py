"""A model on disk, whatever its format: spec, tensors by our names, tokenizer, chat template.

with open_model("model.gguf") as source:
    q = source.tensors["layers.0.q"].read()  # float32 (heads * head_dim, hidden)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmc.compiler.errors import SourceError
from llmc.compiler.progress import Progress
from llmc.compiler.spec import ModelSpec
from llmc.frontends.files.mapped_file import MappedFile
from llmc.frontends.hub import fetch, is_hub
from llmc.frontends.tensor import Tensor


@dataclass(frozen=True)
class Source:
    """An opened model.

    The ids of a prompt are `tokens.bos` if `tokens.add_bos`, then those that the tokenizer gives
    with `add_special_tokens=False`.
    """

    spec: ModelSpec
    tensors: Mapping[str, Tensor]  # our expanded name ("layers.3.q") -> tensor, in model order
    tokenizer_json: bytes
    chat_template: str | None  # Jinja source, rendered by the runtime in its sandbox
    generation: Mapping[str, float | int]  # sampling: temperature, top_k, ...; {} is greedy
    special_tokens: Mapping[str, str]  # bos_token, eos_token, ... -> text, for the template
    languages: Mapping[str, int] = field(default_factory=dict)  # of a translator: "fr" or "fra_Latn" -> its token
    prefixes: Mapping[str, str] = field(default_factory=dict)  # "en to de" -> what is put before such a source

    def close(self) -> None:
        """Unmaps the files. Tensors cannot be read afterwards; arrays that were read stay valid."""
        for file in self._files():
            # A view that someone still holds keeps the map open until it goes.
            with contextlib.suppress(BufferError):
                file.data.close()

    def let_go(self) -> None:
        """Gives back memory that reading took: pages of the files, which are mapped again when they are read again."""
        for file in self._files():
            file.let_go()

    def _files(self) -> list[MappedFile]:
        return list({id(file): file for tensor in self.tensors.values() for file in tensor.files}.values())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_model(path: str | Path, spec: ModelSpec | None = None, progress: Progress | None = None) -> Source:
    """Opens a GGUF file, a checkpoint of llama2.c, a Hugging Face folder, or hf:org/name, which is fetched first.

    `spec` replaces the one derived from metadata. `progress` is told the bytes that are fetched. Reads headers only,
    not weights. Raises SourceError or SpecError, in one line, for anything that is damaged, hostile or not understood.
    """
    path = fetch(str(path), progress) if is_hub(path) else Path(path)
    try:
        folder = path.is_dir()
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be opened: {error}") from None
    if not exists:
        raise SourceError(
            f"{path}: no such file or folder; give a GGUF file, a llama2.c .bin, a model folder or hf:org/name"
        )
    if folder:
        from llmc.frontends.hf.folder import read_folder

        return read_folder(path, spec)
    if path.suffix == ".onnx":
        if spec is None:
            raise SourceError(f"{path}: an ONNX file by itself; give its folder with config.json, or a spec")
        from llmc.frontends.hf.folder import read_folder

        return read_folder(path.parent, spec, path)
    if path.suffix == ".safetensors":
        raise SourceError(f"{path}: give the folder it is in, with config.json and tokenizer.json")
    from llmc.frontends.gguf.file import is_gguf

    if path.suffix == ".bin" and not is_gguf(path):
        from llmc.frontends.llama2c.model import read_llama2c

        return read_llama2c(path, spec)
    from llmc.frontends.gguf.model import read_gguf_model

    return read_gguf_model(path, spec)
