"""Folders without tokenizer.json: the ids of the reference, on hard texts; and what is refused."""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from tokenizers.models import BPE

from llmc.compiler.errors import LlmcError, SourceError
from llmc.frontends.tokenizers.charsmap import read_charsmap
from llmc.frontends.tokenizers.check import check_tokenizer
from llmc.frontends.tokenizers.folder import read_tokenizer
from llmc.frontends.tokenizers.pieces import Frame, set_frame
from llmc.frontends.tokenizers.sentencepiece_model import read_model
from llmc.runtime.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from hard_texts import HARD_TEXTS
from tokenizer_cases import CASES, clear, pieces, train

pytest.importorskip("sentencepiece")
pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

# Token kind -> what a whole text starts and ends with.
FRAMES = {
    "T5": (None, "</s>"), "mT5": (None, "</s>"), "Pegasus": (None, "</s>"), "XLM-R": ("<s>", "</s>"),
    "XGLM": ("</s>", None), "mBART-50": ("en_XX", "</s>"), "Marian": (None, "</s>"), "M2M100": ("__en__", "</s>"),
    "Llama": ("<s>", None), "Gemma": ("<bos>", None), "user-defined": (None, None), "case-folding": (None, None),
    "GPT-2": (None, None), "RoBERTa": ("<s>", "</s>"), "BART": ("<s>", "</s>"), "BERT": ("[CLS]", "[SEP]"),
    "BERT cased": ("[CLS]", "[SEP]"), "BERT accents": ("[CLS]", "[SEP]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ids(name: str, tmp_path: Path) -> None:
    reference = CASES[name].make(tmp_path)
    clear(tmp_path)
    data, file = read_tokenizer(tmp_path, {})
    checked, tokenizer = check_tokenizer(data, file), Tokenizer(data)
    for text in HARD_TEXTS:
        assert tokenizer.encode(text) == list(reference(text)), text
    frame = tuple(None if id_ is None else tokenizer.token(id_) for id_ in (checked.bos, checked.end))
    assert frame == FRAMES[name]
    streamed = tokenizer.stream()
    for text in ("Hello world, hello", "The quick brown fox"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids).replace(" ", "").lower() == text.replace(" ", "").lower()
        assert "".join(map(streamed.push, ids)) + streamed.finish() == tokenizer.decode(ids)
        streamed = tokenizer.stream()


def test_pieces_that_the_model_lacks_are_unknown(tmp_path: Path) -> None:
    """Texts are cut as SentencePiece does it, also into pieces that vocab.json has no id for."""
    reference = CASES["Marian"].make(tmp_path)
    tokenizer = Tokenizer(read_tokenizer(tmp_path, {})[0])
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    absent = [piece for piece in pieces(train()) if piece not in vocab and len(piece) == 1]
    assert absent
    for piece in absent:
        text = f"{piece}{piece}{piece}"
        assert tokenizer.encode(text) == reference(text)
        assert vocab["<unk>"] in tokenizer.encode(text)
    hidden = next(id_ for piece, id_ in vocab.items() if piece not in pieces(train()) and piece.startswith("▁"))
    assert tokenizer.decode([vocab["▁"], hidden]).strip().isalpha()
    assert tokenizer.encode(">>de<< Hello")[0] == vocab[">>de<<"]


def test_the_ids_of_languages(tmp_path: Path) -> None:
    CASES["M2M100"].make(tmp_path)
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tmp_path)
    vocab = check_tokenizer(*read_tokenizer(tmp_path, {})).vocab
    assert {code: vocab[f"__{code}__"] for code in reference.lang_code_to_id} == reference.lang_code_to_id


def _write(folder: Path, **settings: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(train())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"} | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokenizer_class": "NoSuchTokenizer"},
            "tokenizer_class is 'NoSuchTokenizer', llmc knows of this kind: Llama",
        ),
        ({"tokenizer_class": None}, "no tokenizer_class, and model_type is None"),
        ({"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs = {'enable_sampling': True}"),
        ({"do_lower_case": True}, "do_lower_case = True"),
        ({"legacy": 3}, "legacy is 3, wanted true or false"),
        ({"extra_ids": -1}, "extra_ids is -1, wanted 0 to"),
        ({"eos_token": 5}, "eos_token is 5, wanted a text"),
        ({"added_tokens_decoder": {"4": {"content": "x"}}}, "added token 'x' has id 4, but '"),
        ({"added_tokens_decoder": {"-4": {"content": "x"}}}, "added token '-4' is 'x', wanted an id"),
        ({"added_tokens_decoder": {"400": {"content": "x", "lstrip": 1}}}, "lstrip is 1"),
        ({"added_tokens_decoder": 3}, "added_tokens_decoder is 3"),
        ({"extra_special_tokens": 3}, "extra_special_tokens is 3"),
        ({"added_tokens_decoder": {str(i): {"content": "x"} for i in (500, 501)}}, "two tokens with the same text"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        read_tokenizer(_write(tmp_path, **settings), {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_added_tokens(tmp_path: Path) -> None:
    """Each at its id, with its own settings, and holes between them that nothing becomes."""
    older = {"content": "<new>", "lstrip": True, "special": False}
    folder = _write(tmp_path, extra_ids=0, added_tokens_decoder={"2000": older})
    tokenizer = Tokenizer(read_tokenizer(folder, {})[0])
    assert tokenizer.id_of("<new>") == 2000
    assert tokenizer.encode("Hello  <new>") == [*tokenizer.encode("Hello"), 2000]
    assert 2000 not in tokenizer.special_ids
    assert tokenizer.decode([1999]) == "<no token 1999>"


def test_older_files_are_heeded(tmp_path: Path) -> None:
    """special_tokens_map.json and added_tokens.json, where tokenizer_config.json says nothing."""
    folder = _write(tmp_path, extra_ids=0)
    count = len(pieces(train()))
    (folder / "added_tokens.json").write_text(json.dumps({"<old>": count}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<end>", "unk_token": {"content": "<unk>"}})
    )
    checked = check_tokenizer(*read_tokenizer(folder, {}))
    assert (checked.vocab["<old>"], checked.vocab["<end>"], checked.end) == (count, count + 1, count + 1)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no tokenizer.json, nor tokenizer.model, .* or vocab.txt; write it with"):
        read_tokenizer(tmp_path, {})
    _write(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(SourceError, match="tokenizer.model and spiece.model: which"):
        read_tokenizer(tmp_path, {})
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(SourceError, match=r"spiece.model: not a SentencePiece model, or damaged: 0 of 0 pieces"):
        read_tokenizer(tmp_path, {})
    (tmp_path / "spiece.model").unlink()
    (tmp_path / "vocab.txt").write_text("[UNK]\na\na\n")
    with pytest.raises(SourceError, match="vocab.txt: .*no tokenizer_class|vocab.txt: tokenizer_class is 'T5Tok"):
        read_tokenizer(tmp_path, {})
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(SourceError, match="vocab.txt: 'a' appears twice"):
        read_tokenizer(tmp_path, {})
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    for merges, message in (("a c", "'a c' does not join"), ("a", "'a' does not join"), ("b a\n", "'b a' does not")):
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}")
        with pytest.raises(SourceError, match=f"merges.txt: {message}"):
            read_tokenizer(tmp_path, {"model_type": "gpt2"})
    for vocab in ({"a": 0, "b": 0}, {"a": -1}, {"a": 1 << 30}, {"a": "x"}, {}, {"a": 0, "b": 1 << 20}):
        (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        with pytest.raises(SourceError, match="vocab.json: "):
            read_tokenizer(tmp_path, {"model_type": "gpt2"})
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "\ud800": 1}))
    with pytest.raises(SourceError, match="half of a surrogate pair"):
        read_tokenizer(tmp_path, {"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "word"}, r"model_type \(unigram 1, BPE 2\) = 3"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix = 1"),
    ],
)
def test_sentencepiece_models_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_model(train(**options))


@pytest.mark.parametrize("name", ["</s:", "$A"])
def test_frames_that_a_template_would_misread(name: str) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: 0, "a": 1}, unk_token="a"))
    with pytest.raises(SourceError, match="cannot stand round a text"):
        set_frame(tokenizer, Frame(after=0))


@pytest.mark.parametrize("name", ["nmt_nfkc", "nmt_nfkc_cf"])
def test_the_map_of_characters(name: str) -> None:
    """Every key of the trie: SentencePiece's own normalizer gives what was read."""
    import sentencepiece

    data = read_model(train(**{} if name == "nmt_nfkc" else {"normalization_rule_name": name})).rules.charsmap
    table = read_charsmap(data)
    assert len(table) > 200_000
    model = sentencepiece.SentencePieceNormalizer(
        rule_name=name, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )
    keys = random.Random(1).sample(sorted(key for key in table if not key.isspace()), 2000)
    assert [model.normalize(key) for key in keys] == [table[key] for key in keys]


def test_damaged_maps() -> None:
    data = read_model(train()).rules.charsmap
    cycle = struct.pack("<I", 8) + struct.pack("<2I", 0, 1 << 10 | 1) + b"\0"  # the node 1 is its own child
    for damaged in (b"abc", data[:1000], struct.pack("<I", 1 << 30) + data[4:], data[:-70_000], cycle):
        with pytest.raises(SourceError, match="precompiled_charsmap is damaged"):
            read_charsmap(damaged)


def _refusal(folder: Path) -> str:
    try:
        check_tokenizer(*read_tokenizer(folder, {}))
    except LlmcError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["T5", "M2M100", "Llama", "GPT-2", "BERT"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    """Whatever the bytes are, reading them works or raises LlmcError in one line."""
    CASES[name].make(tmp_path)
    clear(tmp_path)
    random_ = random.Random(name)
    files = [file for file in sorted(tmp_path.iterdir()) if file.is_file()]
    for _ in range(15):
        file = random_.choice(files)
        whole = file.read_bytes()
        damaged = bytearray(whole[: random_.randint(0, len(whole))] if random_.random() < 0.3 else whole)
        for _ in range(random_.randint(1, 4)):
            if damaged:
                damaged[random_.randrange(min(len(damaged), 4000))] = random_.randrange(256)
        file.write_bytes(damaged)
        assert "\n" not in _refusal(tmp_path)
        file.write_bytes(whole)


@pytest.mark.parametrize("left", ["a", "a ", "#version"])
@pytest.mark.parametrize("padded", [False, True])
def test_merges_become_texts_where_the_library_reads_them_alike(left: str, padded: bool) -> None:
    vocab = {token: id_ for id_, token in enumerate(["b", "c", "bc", *sorted(set(left) - {"b", "c"})])}
    pairs = [("b", "c")]
    for length in range(2, len(left) + 1):
        pairs.append((left[: length - 1], left[length - 1]))
    pairs.append((left, "bc"))
    for pair in pairs:
        vocab.setdefault("".join(pair), len(vocab))
    backend = tokenizers.Tokenizer(BPE(vocab, pairs))
    if padded:
        backend.enable_padding()
    checked = check_tokenizer(backend.to_str().encode(), "tokenizer.json")
    model = json.loads(checked.json)["model"]
    assert list(model["vocab"].items()) == sorted(vocab.items(), reverse=True)
    merges = model["merges"]
    assert merges == ([" ".join(pair) for pair in pairs] if left == "a" else [list(pair) for pair in pairs])
    same = tokenizers.Tokenizer.from_buffer(checked.json)
    assert same.encode(f"{left}bc").ids == backend.encode(f"{left}bc").ids == [vocab[f"{left}bc"]]


def test_the_page_is_up_to_date(script: Callable[[str], ModuleType]) -> None:
    maker = script("docs/make_tokenizers_page.py")
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), "run: python docs/make_tokenizers_page.py"
