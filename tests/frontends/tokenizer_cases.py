"""Folders with every usual kind of tokenizer files but tokenizer.json, each with the reference for its ids.

A case writes its files into a folder and gives the function of the reference: text -> ids.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Encode = Callable[[str], list[int]]

_LINES = [
    "The quick brown fox jumps over the lazy dog. (It is 3.14 m, not 12!)",
    "Hello world, hello again! 1 2 3 don't user assistant return def pass",
    "Größe über café naïve Ångström “quotes” — dashes §1 ¿es?",
    "日本語のテスト 我想在 한국어 текст привет мир สวัสดี น้ำ が ガ",
    "مرحبا بالعالم नमस्ते दुनिया Cửa Việt ½ № ～ 😀",
] * 8
_GERMAN = ["Der schnelle braune Fuchs springt über den faulen Hund. Größe, Straße", "Hallo Welt, schon wieder!"] * 8


@cache
def train(lines: str = "", **options: Any) -> bytes:
    """A SentencePiece model; `lines` "german" is the other language."""
    import sentencepiece

    model = io.BytesIO()
    settings = {"model_type": "unigram", "vocab_size": 320, "hard_vocab_limit": False, "minloglevel": 2}
    sentences = iter(_GERMAN if lines == "german" else _LINES)
    # Not every character is a piece, so that there are unknown ones.
    settings |= {"sentence_iterator": sentences, "model_writer": model, "character_coverage": 0.98}
    sentencepiece.SentencePieceTrainer.train(**settings | options)
    return model.getvalue()


def processor(data: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=data)


def pieces(data: bytes) -> list[str]:
    model = processor(data)
    return [model.id_to_piece(i) for i in range(model.get_piece_size())]


@dataclass(frozen=True)
class Case:
    """`files`, what its ids are compared with, how the folder is made, and what is known to differ."""

    files: str
    reference: str
    make: Callable[[Path], Encode]
    differs: str = ""


def _settings(folder: Path, **values: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def _plain(name: str, cls: str, *, settings: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], Encode]:
    """A folder whose ids are SentencePiece's own."""

    def make(folder: Path) -> Encode:
        data = train(**options)
        (folder / name).write_bytes(data)
        _settings(folder, tokenizer_class=cls, **settings or {})
        return processor(data).encode

    return make


def _shifted(cls: str, first: int, replaced: int, unknown: int, **options: Any) -> Callable[[Path], Encode]:
    """A folder whose ids begin with `first` tokens in place of SentencePiece's first `replaced`."""

    def make(folder: Path) -> Encode:
        data = train(**options)
        (folder / "sentencepiece.bpe.model").write_bytes(data)
        _settings(folder, tokenizer_class=cls)
        model = processor(data)
        return lambda text: [unknown if model.is_unknown(i) else i + first - replaced for i in model.encode(text)]

    return make


def _marian(folder: Path) -> Encode:
    from transformers import MarianTokenizer

    source, target = train(), train("german", vocab_size=150)
    files = {"source.spm": source, "target.spm": target}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    vocab = {"</s>": 0, "<unk>": 1, ">>de<<": 2}
    own = [piece for piece in pieces(target)[3:] if len(piece) > 1]
    for piece in (*own, *pieces(source)[3:-5]):  # some of the source's are missing
        vocab.setdefault(piece, len(vocab))
    vocab["<pad>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return _saved(folder, MarianTokenizer(*(str(folder / n) for n in (*files, "vocab.json"))))


def _m2m100(folder: Path) -> Encode:
    from transformers import M2M100Tokenizer

    data = train(model_type="bpe")
    (folder / "spm").write_bytes(data)
    vocab: dict[str, int] = {}
    for piece in ("<s>", "<pad>", "</s>", "<unk>", *pieces(data)[3:-5]):
        vocab.setdefault(piece, len(vocab))
    (folder / "vocab").write_text(json.dumps(vocab))
    return _saved(folder, M2M100Tokenizer(str(folder / "vocab"), str(folder / "spm"), src_lang="en", tgt_lang="fr"))


def _saved(folder: Path, tokenizer: Any) -> Encode:
    tokenizer.save_pretrained(folder)
    return lambda text: tokenizer(text, add_special_tokens=False).input_ids


def _byte_level(cls: str, **settings: Any) -> Callable[[Path], Encode]:
    def make(folder: Path) -> Encode:
        import transformers
        from tokenizers import ByteLevelBPETokenizer

        trained = ByteLevelBPETokenizer()
        names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
        trained.train_from_iterator(_LINES, vocab_size=400, special_tokens=names, show_progress=False)
        trained.save_model(str(folder))
        _settings(folder, tokenizer_class=cls, **settings)
        tokenizer = getattr(transformers, cls)(str(folder / "vocab.json"), str(folder / "merges.txt"), **settings)
        return lambda text: tokenizer(text, add_special_tokens=False).input_ids

    return make


def _wordpiece(**settings: Any) -> Callable[[Path], Encode]:
    def make(folder: Path) -> Encode:
        from tokenizers import BertWordPieceTokenizer
        from transformers import BertTokenizer

        trained = BertWordPieceTokenizer(lowercase=settings.get("do_lower_case", True))
        trained.train_from_iterator(_LINES, vocab_size=400, show_progress=False)
        trained.save_model(str(folder))
        _settings(folder, tokenizer_class="BertTokenizer", **settings)
        tokenizer = BertTokenizer(str(folder / "vocab.txt"), **settings)
        return lambda text: tokenizer(text, add_special_tokens=False).input_ids

    return make


def clear(folder: Path) -> None:
    """Removes what would be taken first."""
    (folder / "tokenizer.json").unlink(missing_ok=True)
    shutil.rmtree(folder / ".cache", ignore_errors=True)


_SPM = "sentencepiece"
_HF = "transformers"
_RUNS = "a run of characters that SentencePiece does not know is the unknown token, not looked up as a whole"
_MARKS = "a compatibility character before an accent, as ﬁ before ́, is joined with it"

CASES = {
    "T5": Case("spiece.model (unigram)", _SPM, _plain("spiece.model", "T5Tokenizer"), _MARKS),
    "mT5": Case(
        "spiece.model (unigram, bytes)",
        _SPM,
        _plain("spiece.model", "MT5Tokenizer", settings={"extra_ids": 0}, byte_fallback=True, vocab_size=600),
        _MARKS,
    ),
    "Pegasus": Case(
        "spiece.model (105 first)", _SPM,
        _shifted("PegasusTokenizer", 105, 2, 105, pad_id=0, eos_id=1, unk_id=2, bos_id=-1), _MARKS,
    ),
    "XLM-R": Case("sentencepiece.bpe.model (fairseq)", _SPM, _shifted("XLMRobertaTokenizer", 4, 3, 3), _MARKS),
    "XGLM": Case("sentencepiece.bpe.model (fairseq)", _SPM, _shifted("XGLMTokenizer", 4, 3, 3), _MARKS),
    "mBART-50": Case(
        "sentencepiece.bpe.model (fairseq, languages)", _SPM, _shifted("MBart50Tokenizer", 4, 3, 3), _MARKS
    ),
    "Marian": Case("source.spm, vocab.json", _HF, _marian, _RUNS),
    "M2M100": Case("sentencepiece.bpe.model (BPE), vocab.json", _HF, _m2m100, _MARKS),
    "Llama": Case(
        "tokenizer.model (BPE, bytes)",
        _SPM,
        _plain(
            "tokenizer.model", "LlamaTokenizer", model_type="bpe", byte_fallback=True, vocab_size=600,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
        ),
    ),
    "Gemma": Case(
        "tokenizer.model (BPE, bytes, no prefix)",
        _SPM,
        _plain(
            "tokenizer.model", "GemmaTokenizer", model_type="bpe", byte_fallback=True, vocab_size=600,
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        ),
    ),
    "user-defined": Case(
        "tokenizer.model (unigram, user-defined pieces)",
        _SPM,
        _plain("tokenizer.model", "BertGenerationTokenizer", user_defined_symbols=(".", "(", "<sep>")),
        _MARKS,
    ),
    "case-folding": Case(
        "tokenizer.model (unigram, nmt_nfkc_cf)",
        _SPM,
        _plain("tokenizer.model", "BertGenerationTokenizer", normalization_rule_name="nmt_nfkc_cf"),
        "the library's own step: letter and accents of six bytes stay apart",
    ),
    "GPT-2": Case("vocab.json, merges.txt", _HF, _byte_level("GPT2Tokenizer")),
    "RoBERTa": Case("vocab.json, merges.txt", _HF, _byte_level("RobertaTokenizer")),
    "BART": Case("vocab.json, merges.txt", _HF, _byte_level("BartTokenizer", add_prefix_space=True)),
    "BERT": Case("vocab.txt", _HF, _wordpiece()),
    "BERT cased": Case("vocab.txt", _HF, _wordpiece(do_lower_case=False)),
    "BERT accents": Case(
        "vocab.txt", _HF, _wordpiece(strip_accents=False, tokenize_chinese_chars=False)
    ),
}  # fmt: skip
