"""Readers of tokenizers: SentencePiece models, GGUF keys, the files of a folder."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from mutate import as_json, change_bytes, change_tree
from reader import Reader

from llmc.frontends.gguf.tokenizer import adds_bos_by_default, ends_by_default, make_tokenizer, token_texts
from llmc.frontends.tokenizers.charsmap import read_charsmap
from llmc.frontends.tokenizers.check import check_tokenizer
from llmc.frontends.tokenizers.folder import read_tokenizer
from llmc.frontends.tokenizers.pieces import Frame, Vocabulary, make_json
from llmc.frontends.tokenizers.sentencepiece_model import read_model
from llmc.runtime.text.tokenizer import Tokenizer


@cache
def _models() -> list[bytes]:
    """Tiny models; the map of characters has a few entries."""
    import sentencepiece

    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as table:
        table.write("41\t61\n65 301\te9\n20 20\t20\nFB01\t66 69\n")
        table.flush()
        found = []
        for options in (
            {"model_type": "unigram"}, {"model_type": "bpe"}, {"model_type": "bpe", "byte_fallback": True},
            {"model_type": "unigram", "normalization_rule_tsv": table.name, "user_defined_symbols": ["<x>"]},
        ):  # fmt: skip
            model = io.BytesIO()
            plain = {"normalization_rule_name": "identity"} if "normalization_rule_tsv" not in options else {}
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(["ab abc a b ba cab"] * 9), model_writer=model, minloglevel=2,
                hard_vocab_limit=False, vocab_size=275 if "byte_fallback" in options else 14, **plain | options,
            )  # fmt: skip
            found.append(model.getvalue())
    return found


def _encode(data: bytes) -> None:
    """What a request then does with the tokenizer."""
    checked = check_tokenizer(data, "tokenizer.json")
    tokenizer = Tokenizer(checked.json)
    for text in ("ab <x> \u00e9\U0001f600", "</s>"):
        tokenizer.decode(tokenizer.encode(text))


def _sentencepiece(_: Path) -> Reader:
    samples = _models()
    maps = {read_model(sample).rules.charsmap for sample in samples}

    def read(data: bytes) -> None:
        model = read_model(data)
        read_charsmap(model.rules.charsmap)
        if model.rules.charsmap in maps:  # to tell another takes a second
            _encode(make_json(Vocabulary(model.pieces), model.rules, Frame()))

    return Reader(samples, lambda random: change_bytes(random, samples), read)


def _charsmap(_: Path) -> Reader:
    samples = [read_model(_models()[-1]).rules.charsmap]
    return Reader(samples, lambda random: change_bytes(random, samples), read_charsmap)


def _gguf_tokenizer(_: Path) -> Reader:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "\u2581", "\u2581ab", "abc"]
    known = {"tokens": tokens, "token_type": [2, 3, 3] + [1] * 7, "unknown_token_id": 0, "eos_token_id": 2}
    scores = [0.0] * 3 + [-float(i) for i in range(7)]
    table = list(read_model(_models()[-1]).rules.charsmap)
    trees: list[dict[str, Any]] = [
        known | {"model": "gpt2", "pre": "llama-bpe", "merges": ["a b", "ab c"]},
        known | {"model": "t5", "scores": scores, "remove_extra_whitespaces": True},
        known | {"model": "bert", "seperator_token_id": 2},
        known | {"model": "t5", "scores": scores, "precompiled_charsmap": table, "add_eos_token": True},
    ]

    def make(random: Random) -> Any:
        return change_tree(random, random.choice(trees))

    def read(tree: Any) -> None:
        metadata = {f"tokenizer.ggml.{key}": value for key, value in tree.items()}
        adds_bos_by_default(metadata)
        ends_by_default(metadata)
        table_now = tree.get("precompiled_charsmap")
        if isinstance(table_now, list) and table_now not in ([], table):
            metadata |= {"tokenizer.ggml.precompiled_charsmap": []}
        _encode(make_tokenizer(metadata))
        token_texts(metadata)

    return Reader(trees, make, read)


def _folder(folder: Path) -> Reader:
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5, "c": 6, "ab": 7, "abc": 8, "\u2581": 9}
    model = _models()[0]
    settings: dict[str, Any] = {
        "eos_token": "</s>", "unk_token": {"content": "<unk>", "lstrip": False}, "legacy": True, "extra_ids": 2,
        "added_tokens_decoder": {"2": {"content": "</s>", "special": True}}, "language_codes": "wmt21",
        "additional_special_tokens": ["<more>"], "add_bos_token": True, "num_madeup_words": 1, "do_lower_case": False,
    }  # fmt: skip
    files: list[tuple[str, dict[str, bytes], dict[str, Any]]] = [
        ("T5Tokenizer", {"spiece.model": model}, {}),
        ("XLMRobertaTokenizer", {"sentencepiece.bpe.model": model}, {}),
        ("MarianTokenizer", {"source.spm": model}, vocab),
        ("M2M100Tokenizer", {"sentencepiece.bpe.model": _models()[1]}, vocab),
        ("GPT2Tokenizer", {"merges.txt": b"#version: 0.2\na b\nab c\n"}, vocab | {"<|endoftext|>": 10}),
        ("BertTokenizer", {"vocab.txt": b"[PAD]\n[UNK]\n</s>\n<unk>\n[CLS]\n[SEP]\na\n##b\n"}, {}),
    ]
    whole = [
        (kept, {"tokenizer_class": name} | settings | ({"unk_token": "[UNK]"} if name[0] == "B" else {}), words)
        for name, kept, words in files
    ]
    samples = [_case(*case) for case in whole]

    def make(random: Random) -> dict[str, bytes]:
        kept, said, words = random.choice(whole)
        if random.random() < 0.4:
            case = _case(kept, said, words)
            name = random.choice(list(case))
            return case | {name: change_bytes(random, [case[name]])}
        if words and random.random() < 0.5:
            return _case(kept, said, {}) | {"vocab.json": as_json(random, change_tree(random, words))}
        return _case(kept, {}, words) | {"tokenizer_config.json": as_json(random, change_tree(random, said))}

    def lay(case: dict[str, bytes]) -> None:
        for old in folder.iterdir():
            old.unlink()
        for name, data in case.items():
            (folder / name).write_bytes(data)

    return Reader(samples, make, lambda _: _encode(read_tokenizer(folder, {})[0]), lay=lay)


def _case(kept: dict[str, bytes], said: dict[str, Any], words: dict[str, Any]) -> dict[str, bytes]:
    texts = {"tokenizer_config.json": said} | ({"vocab.json": words} if words else {})
    return kept | {name: json.dumps(value).encode() for name, value in texts.items()}


TOKENIZERS: dict[str, Callable[[Path], Reader]] = {
    "sentencepiece": _sentencepiece,
    "charsmap": _charsmap,
    "gguf-tokenizer": _gguf_tokenizer,
    "tokenizer-folder": _folder,
}
