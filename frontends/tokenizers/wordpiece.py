"""A list of WordPiece tokens -> a tokenizer of the library (https://arxiv.org/abs/1810.04805; vocab.txt of BERT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip

_LONGEST_WORD = 100  # characters; a longer one is unknown


@dataclass(frozen=True)
class Cleaning:
    """How a text is changed first. `strip_accents` None: as `lowercase`."""

    lowercase: bool = True
    strip_accents: bool | None = None
    chinese_apart: bool = True


def make_wordpiece(tokens: Sequence[str], unknown: str, special: Sequence[str], cleaning: Cleaning) -> Tokenizer:
    """The library's tokenizer, with `special` never cut. Raises SourceError when it cannot be."""
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    if unknown not in vocab:
        raise SourceError(f"no unknown token {clip(unknown)} among the {len(tokens)}")
    tokenizer = Tokenizer(WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=cleaning.chinese_apart,
        strip_accents=cleaning.strip_accents,
        lowercase=cleaning.lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def of_gguf(tokens: Sequence[str], control: Sequence[str]) -> list[str]:
    """A GGUF file marks where a word begins; WordPiece marks where one goes on."""
    kept = set(control)
    return [_continued(token) if token not in kept else token for token in tokens]


def _continued(token: str) -> str:
    return token[1:] if token.startswith("\u2581") else f"##{token}"
