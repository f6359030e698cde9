"""The tokenizer made from GGUF metadata gives the ids that the model was trained with."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from llmc.compiler.errors import LlmcError, SourceError
from llmc.frontends.gguf.file import read_gguf
from llmc.frontends.gguf.pretokenizers import PRE_TOKENIZERS
from llmc.frontends.gguf.tokenizer import adds_bos_by_default, ends_by_default, make_tokenizer
from llmc.frontends.source import open_model
from llmc.frontends.tokenizers.sentencepiece_model import read_model

sys.path.insert(0, str(Path(__file__).parent))
from hard_texts import HARD_TEXTS
from tokenizer_cases import CASES, processor, train


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


@pytest.fixture(scope="module")
def demo(smollm2_gguf: Path) -> Tokenizer:
    with open_model(smollm2_gguf) as source:
        return Tokenizer.from_buffer(source.tokenizer_json)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Tokenizer:
    """transformers' own conversion, with SmolLM's way to cut digits, which it leaves out."""
    from transformers import AutoTokenizer

    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name).backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return tokenizer


@pytest.mark.model
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_demo_ids(demo: Tokenizer, reference: Tokenizer, text: str) -> None:
    found = ids(demo, text)
    assert found == ids(reference, text)
    assert demo.decode(found, skip_special_tokens=False) == text


@pytest.mark.model
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(text=st.text(max_size=40))
def test_demo_ids_of_any_text(demo: Tokenizer, reference: Tokenizer, text: str) -> None:
    assert ids(demo, text) == ids(reference, text)  # not the text again: its vocabulary lacks bytes


@pytest.mark.model
def test_demo_special_tokens(demo: Tokenizer) -> None:
    assert ids(demo, "<|im_start|>user\n")[:1] == [1]
    assert ids(demo, "<|im_end|>") == [2]
    assert demo.decode([1, 28120, 2]) == demo.decode([28120])
    assert demo.encode("hi").ids == ids(demo, "hi")  # adds nothing by itself


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loses_nothing(tiny_gguf: Callable[..., Path], pre: str) -> None:
    """A tiny vocabulary has all bytes, so any text comes back, however it is cut."""
    metadata = read_gguf(tiny_gguf({"tokenizer.ggml.pre": pre})).metadata
    tokenizer = Tokenizer.from_buffer(make_tokenizer(metadata))
    for text in HARD_TEXTS:
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text
    assert adds_bos_by_default(metadata) == PRE_TOKENIZERS[pre].add_bos


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234 ok", ["it", "'s", " 1234", " ok"]),
        ("smollm", "it's 1234 ok", ["it", "'s", " ", "1", "2", "3", "4", " ok"]),
        ("llama-bpe", "IT'S 1234 ok", ["IT", "'S", " ", "123", "4", " ok"]),
        ("qwen2", "it's 1234 ok", ["it", "'s", " ", "1", "2", "3", "4", " ok"]),
        ("default", "it's 12345 ok", ["it", "'", "s", " ", "123", "45", " ok"]),
        ("falcon", "it's 1234` ok", ["it", "'", "s", " ", "123", "4", "`", " ok"]),
        ("bloom", "it's 1234, ok", ["it's", " 1234", ",", " ok"]),
        ("glm4", "IT'S 1234 ok", ["IT", "'S", " ", "123", "4", " ok"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-2", "a  b\n\nc", ["a", " ", " b", "\n", "\n", "c"]),
    ],
)
def test_where_texts_are_cut(tiny_gguf: Callable[..., Path], pre: str, text: str, pieces: list[str]) -> None:
    data = make_tokenizer(read_gguf(tiny_gguf({"tokenizer.ggml.pre": pre})).metadata)
    cutter = Tokenizer.from_buffer(data).pre_tokenizer
    assert [text[a:b] for _, (a, b) in cutter.pre_tokenize_str(text)] == pieces


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """A SentencePiece BPE model with byte fallback, trained on a few lines, as Llama 2 has."""
    library = pytest.importorskip("sentencepiece")
    lines = ["The quick brown fox jumps over the lazy dog. ", "Hello world, hello again! 1 2 3"]
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20),
        model_writer=model,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return library.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model: Any) -> dict[str, Any]:
    count = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(count)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
    }


# The reference takes control tokens as plain text, and a NUL byte and "<unk>" in its own way.
PLAIN_TEXTS = [text for text in HARD_TEXTS if "<|" not in text and "\0" not in text and text]


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_sentencepiece_ids(sentencepiece: Any, text: str) -> None:
    tokenizer = Tokenizer.from_buffer(make_tokenizer(sentencepiece_metadata(sentencepiece)))
    assert ids(tokenizer, text) == sentencepiece.encode(text)
    assert tokenizer.decode(ids(tokenizer, text)) == text.replace("▁", " ")


def test_sentencepiece_without_space_prefix(sentencepiece: Any) -> None:
    metadata = sentencepiece_metadata(sentencepiece) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_buffer(make_tokenizer(metadata))
    assert ids(tokenizer, " Hello") == sentencepiece.encode("Hello")
    assert tokenizer.decode(ids(tokenizer, " Hello")) == " Hello"
    assert adds_bos_by_default(metadata)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scores": None}, "scores is None"),
        ({"scores": [float("nan")] * 340}, "wanted 340 finite numbers"),
        ({"scores": [0.0]}, "wanted 340 finite numbers"),
        ({"add_space_prefix": 3}, "add_space_prefix = 3"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces = True"),
        ({"tokens": ["x" * 2000] + [str(i) for i in range(339)]}, "2000 characters"),
        ({"tokens": [str(i) for i in range(340)]}, "lacks 256 byte tokens, first <0x00>"),
    ],
)
def test_sentencepiece_metadata_that_is_refused(sentencepiece: Any, keys: dict[str, Any], message: str) -> None:
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    with pytest.raises(SourceError, match=message):
        make_tokenizer(sentencepiece_metadata(sentencepiece) | changed)


def test_unigram_ids() -> None:
    """Kind t5: SentencePiece's own, with its map of characters as GGUF keeps it."""
    data = train()
    model = read_model(data)
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece.text for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [piece.kind for piece in model.pieces],
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": list(model.rules.charsmap),
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer, reference = Tokenizer.from_buffer(make_tokenizer(metadata)), processor(data)
    for text in HARD_TEXTS:
        assert ids(tokenizer, text) == reference.encode(text), text
    assert ends_by_default(metadata) == 2
    assert ends_by_default(metadata | {"tokenizer.ggml.add_eos_token": False}) is None
    assert not adds_bos_by_default(metadata)
    with pytest.raises(SourceError, match=r"precompiled_charsmap is \[300\], wanted bytes"):
        make_tokenizer(metadata | {"tokenizer.ggml.precompiled_charsmap": [300]})
    with pytest.raises(SourceError, match="precompiled_charsmap is damaged"):
        make_tokenizer(metadata | {"tokenizer.ggml.precompiled_charsmap": [7] * 100})


def test_wordpiece_ids(tmp_path: Path) -> None:
    """Kind bert: a GGUF file marks where words begin."""
    reference = CASES["BERT"].make(tmp_path)
    words = (tmp_path / "vocab.txt").read_text(encoding="utf-8").split()
    special = [word for word in words if word[0] == "[" and word[-1] == "]" and len(word) > 2]
    tokens = [w if w in special else w[2:] if w.startswith("##") else f"▁{w}" for w in words]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if word in special else 1 for word in words],
        "tokenizer.ggml.unknown_token_id": words.index("[UNK]"),
        "tokenizer.ggml.seperator_token_id": words.index("[SEP]"),
    }
    tokenizer = Tokenizer.from_buffer(make_tokenizer(metadata))
    for text in HARD_TEXTS:
        assert ids(tokenizer, text) == reference(text), text
    assert adds_bos_by_default(metadata)
    assert ends_by_default(metadata) == words.index("[SEP]")
    with pytest.raises(SourceError, match="unknown_token_id is 10000, wanted an id"):
        make_tokenizer(metadata | {"tokenizer.ggml.unknown_token_id": 10000})


def test_pieces_with_merges() -> None:
    """Kind gemma4: the merges are in the file, and newlines stand apart."""
    tokens = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "\n", "\n\n"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * 7,
        "tokenizer.ggml.merges": ["a b", "▁ ab", "\n \n"],
    }
    tokenizer = Tokenizer.from_buffer(make_tokenizer(metadata))
    assert tokenizer.encode(" ab\n\nab é<bos>").tokens == [
        "▁ab", "\n\n", "ab", "▁", "<0xC3>", "<0xA9>", "<bos>",
    ]  # fmt: skip
    assert tokenizer.decode(ids(tokenizer, " ab\n\nab é")) == " ab\n\nab é"


VOCABULARIES = os.environ.get("LLMC_GGUF_VOCABS", "")


@pytest.mark.skipif(not VOCABULARIES, reason="LLMC_GGUF_VOCABS: a folder of ggml-vocab-*.gguf")
def test_llama_cpp_vocabularies() -> None:
    """llama.cpp's own test vectors (models/ggml-vocab-*.gguf with .inp and .out)."""
    checked = []
    for path in sorted(Path(VOCABULARIES).glob("*.gguf")):
        texts, wanted = (Path(f"{path}{suffix}") for suffix in (".inp", ".out"))
        if not texts.exists():
            continue
        try:
            tokenizer = Tokenizer.from_buffer(make_tokenizer(read_gguf(path).metadata))
        except LlmcError:
            continue
        lines = texts.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        for line, numbers in zip(lines, wanted.read_text().split("\n"), strict=False):
            assert ids(tokenizer, line) == [int(number) for number in numbers.split()], path.name
        checked.append(path.name)
    assert len(checked) >= 13
