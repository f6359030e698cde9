"""The tokenizer beside a checkpoint of llama2.c -> tokenizer.json.

tokenizer.bin (llama2.c's tokenizer.py, `export`): the length of the longest token, then for every token its score
(float32), its length (uint32) and its text, UTF-8, with plain spaces for SentencePiece's visible ones. Ids are as in
Llama 2: 0 unknown, 1 and 2 the ends of a text, from 3 on the 256 bytes. tokenizer.model is SentencePiece's own file.
"""

from __future__ import annotations

import struct
from pathlib import Path

from llmc.compiler.errors import LlmcError, SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import inside, read_bounded
from llmc.frontends.tokenizers.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, Frame, Piece, Rules, Vocabulary, make_json
from llmc.frontends.tokenizers.sentencepiece_model import SentencePieceModel, read_model

BOS, EOS = 1, 2
MAX_BYTES = 128 << 20
MAX_TOKEN = 1 << 12  # bytes
_FIRST_BYTE = 3
_SPACE = "\u2581"  # SentencePiece's visible space


def read_tokenizer(model: Path, vocab: int) -> tuple[str, bytes]:
    """The name of the file beside `model`, and tokenizer.json of its `vocab` tokens."""
    for name, read in (("tokenizer.bin", _read_bin), ("tokenizer.model", read_model)):
        if (model.parent / name).exists() and name != model.name:
            try:
                found = read(read_bounded(inside(model.parent, name), MAX_BYTES))
                count = len(found.pieces)
                if count != vocab:
                    raise SourceError(f"{count} tokens, but the model has {vocab}")
                return name, make_json(Vocabulary(found.pieces), found.rules, Frame())
            except LlmcError as error:
                raise SourceError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None
    raise SourceError(f"{model.name}: no tokenizer.bin or tokenizer.model beside it; copy the model's there")


def _read_bin(data: bytes) -> SentencePieceModel:
    """The model that the file was exported from."""
    tokens: list[str] = []
    scores: list[float] = []
    at = 4  # after the length of the longest, which only a C program needs beforehand
    while at < len(data):
        if at + 8 > len(data):
            raise SourceError(f"ends within token {len(tokens)}; it is cut short")
        score, length = struct.unpack_from("<fI", data, at)
        raw = data[at + 8 : at + 8 + length]
        if not 0 < length <= MAX_TOKEN or len(raw) != length:
            raise SourceError(f"token {len(tokens)} of {length} bytes, wanted 1 to {MAX_TOKEN} that are there")
        try:
            tokens.append(raw.decode("utf-8").replace(" ", _SPACE))
        except UnicodeDecodeError:
            raise SourceError(f"token {len(tokens)}, {clip(raw)}, is not UTF-8") from None
        scores.append(score)
        at += 8 + length
    first = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    if tokens[: len(first)] != first:
        wrong = next((i for i, (a, b) in enumerate(zip(tokens, first, strict=False)) if a != b), len(tokens))
        raise SourceError(
            f"token {wrong} is {clip(tokens[wrong] if wrong < len(tokens) else None)}, wanted {first[wrong]!r}: "
            "unknown, two ends of text and 256 bytes come first"
        )
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - len(first))
    tokens[BOS], tokens[EOS] = "<s>", "</s>"
    pieces = tuple(Piece(*piece) for piece in zip(tokens, scores, types, strict=True))
    return SentencePieceModel(pieces, Rules("bpe", True, b"", prefix=True, trim=False))
