"""runtime/native, the C interface, against what Python's runtime does: JSON, hashes, tokenizers, text."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from llmc.frontends.gguf.pretokenizers import PRE_TOKENIZERS
from llmc.runtime.loading import large_pages
from llmc.runtime.loading.schema import canonical_json, parse_json
from llmc.runtime.text.tokenizer import Tokenizer

Ask = Callable[..., bytes]


@pytest.fixture(scope="session")
def ask(native: Path) -> Ask:
    """A function `(command, *arguments, given=b"") -> what the probe writes`."""

    def ask(*arguments: object, given: bytes = b"") -> bytes:
        command = [native / "llmc" / "native_probe", *map(str, arguments)]
        done = subprocess.run(command, input=given, capture_output=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, b""), (done.stdout[-500:], done.stderr)
        return done.stdout

    return ask


def test_files_stay_short(root: Path) -> None:
    files = [path for folder in ("runtime/native", "examples/embed_cpp") for path in (root / folder).iterdir()]
    for path in [*files, root / "tests" / "native_probe.cc"]:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 400, path
        assert max(map(len, lines)) <= 120, path


# --- weights that move into large pages ---


@pytest.mark.skipif(not large_pages._has_large_pages(), reason="this system has no large pages")
@pytest.mark.parametrize("faster", [0, 1e9])
def test_weights_move_where_that_is_faster_and_stay_what_they_are(ask: Ask, tmp_path: Path, faster: float) -> None:
    page, data = 2 << 20, random.Random(0).randbytes(20 * (2 << 20) + 12345)
    (tmp_path / "weights").write_bytes(data)
    steps = ["0.5", "0.0001", *["1e9"] * 3000]  # which count for no more than reading all pages takes
    *lines, digest = ask("move", tmp_path / "weights", len(data), faster, *steps).decode().split("\n")[:-1]
    copied, mapped, done = zip(*(map(int, line.split()) for line in lines), strict=True)
    assert copied[:3] == (0, 1, 8)  # the first steps pay nothing, the next for a page, then there are samples,
    assert copied[3:7] == (8,) * 4  # of which it sees five times how fast they are
    assert copied[-1] in ([8] if faster else [19, 20])  # by where the map happens to lie
    assert [mapped[0] - each * page for each in copied] == list(mapped)
    assert done == tuple(number > 6 and each == copied[-1] for number, each in enumerate(copied))
    assert digest == hashlib.sha256(data).hexdigest()


@pytest.mark.skipif(not large_pages._has_large_pages(), reason="this system has no large pages")
def test_of_large_weights_other_pages_are_tried_as_well(ask: Ask, tmp_path: Path) -> None:
    size = 205 * (2 << 20)
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(size)  # nothing is written: zeros
    lines = ask("move", tmp_path / "weights", size, 1e9, *["1e9"] * 15).decode().split("\n")[:-2]
    copied, _, done = zip(*(map(int, line.split()) for line in lines), strict=True)
    assert copied == (8,) * 6 + (16,) * 9  # five looks after the first, five after the second, and no third
    assert done == (0,) * 11 + (1,) * 4


# --- JSON, hashes, UTF-8 ---

_SOUND = [
    *("0", "-0", "1", "-17", "123456789012345678901234567890", "true", "false", "null", "[]", "{}", " [ 1 , 2 ] "),
    *("1.0", "-0.0", "0.1", "1e5", "1E+2", "1.5e300", "5e-324", "1e16", "1e15", "123456789012345.6", "1e-4", "1e-5"),
    *("9.999999747378752e-06", "0.30000000000000004", "2.5E-7", "-1.7976931348623157e308", "1234567890123456789.0"),
    r'{"b": 1, "a": "\u00e9\n\"\\\/\u0001\ud83d\ude00", "": [[[]]], "ab": {"z": null}, "\u2603": "é"}',
    '["\x7f\u2028", "\\b\\f\\r\\t"]',
]
_UNSOUND = [
    *("", " ", "01", "1.", ".5", "-", "+1", "1e", "0x1", "NaN", "Infinity", "-Infinity", "nul", "truee", "[1,]", "[,]"),
    *(
        "{,}",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        "{a:1}",
        "[1 2]",
        "[1",
        "]",
        '"',
        '"\\x"',
        '"\\u12"',
        '"\t"',
        "1 2",
        "[" * 9999,
    ),
    *('{"a":1,"a":2}', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud800\\u0041"', "1e999", "'a'", "[1]x", '{"a":1 "b":2}'),
]


def test_json_is_read_and_spelled_as_python_does(ask: Ask) -> None:
    shuffled = random.Random(0)
    reals = [repr(shuffled.uniform(-1, 1) * 10.0 ** shuffled.randint(-320, 300)) for _ in range(2000)]
    sound = [*_SOUND, *reals]
    lines = ask("json", given="\n".join([*sound, *_UNSOUND, ""]).encode()).decode().split("\n")
    assert lines[: len(sound)] == [canonical_json(parse_json(text.encode())).decode() for text in sound]
    assert [line[:8] for line in lines[len(sound) : -1]] == ["refused:"] * len(_UNSOUND)


def test_hashes(ask: Ask) -> None:
    data = random.Random(0).randbytes(1000)
    sizes = [*range(0, 200), 1000]
    wanted = [hashlib.sha256(data[:n]).hexdigest() for n in sizes for _ in range(2)]  # one for each way to do it
    assert ask("sha256", *sizes, given=data).decode().split() == wanted


def test_bytes_become_text_as_in_python(ask: Ask) -> None:
    shuffled = random.Random(0)
    pieces = ["é", "日", "🙂", "a", *map(chr, (0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF))]
    whole = [c.encode() for c in pieces] + [
        bytes([b]) for b in (0x80, 0xBF, 0xC0, 0xC1, 0xE0, 0xED, 0xF0, 0xF4, 0xF5, 0xFF)
    ]
    cut = [piece[:n] for piece in whole for n in range(1, len(piece))]
    data = b"".join(shuffled.choices(whole + cut, k=5000))
    for size in (1, 2, 3, 5000):
        assert ask("utf8", size, given=data) == data.decode("utf-8", "replace").encode()


# --- tokenizers ---


def test_kinds_of_characters_are_the_library_s(script: Callable[[str], ModuleType]) -> None:
    categories = script("tests/native_categories.py")
    assert categories.TABLE.read_text(encoding="utf-8") == categories.table(), "run tests/native_categories.py"


@pytest.fixture(scope="module")
def texts(script: Callable[[str], ModuleType]) -> list[str]:
    """Hard texts, and texts of characters drawn from all kinds."""
    shuffled = random.Random(0)
    hard = script("tests/frontends/hard_texts.py").HARD_TEXTS
    kinds = [
        " ",
        "  ",
        "\n",
        "\t",
        "a",
        "Zß",
        "'s",
        "'LL",
        "'ſ",
        "7",
        "½",
        "٣",
        "日",
        "é",
        "\u0301",
        "!",
        "$",
        "—",
        "🙂",
        "\u3000",
        "<s>",
    ]
    drawn = ["".join(shuffled.choices(kinds, k=shuffled.randint(1, 40))) for _ in range(300)]
    low = ["".join(chr(shuffled.randrange(1, 0x3000)) for _ in range(60)) for _ in range(60)]
    return [text for text in [*hard, *drawn, *low] if "\0" not in text]


@pytest.fixture(scope="module")
def trained(texts: list[str]) -> dict[str, Any]:
    """A byte-level tokenizer.json, to be given other ways of cutting texts."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts * 2, trainer)
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "<s><s>", "<|im_end|>")])
    backend.add_tokens([AddedToken(t, normalized=True) for t in ("é", "  x", "s>")])
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


def same_ids(ask: Ask, path: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer(path.read_bytes())
    found = ask("encode", path, given=b"".join(text.encode() + b"\0" for text in texts)).decode().split("\n")
    wanted = [tokenizer.encode(text) for text in texts]
    assert [[int(i) for i in line.split()] for line in found[:-1]] == wanted
    lines = "\n".join([*(" ".join(map(str, ids)) for ids in wanted), ""])
    assert ask("decode", path, given=lines.encode()).decode().split("\0")[:-1] == [tokenizer.decode(i) for i in wanted]


def cuts(*splits: str) -> Any:
    """A pre-tokenizer of regular expressions and bytes, as JSON."""
    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    chain = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return _as_json(chain)


def _as_json(pre_tokenizer: Any) -> Any:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    return json.loads(backend.to_str())["pre_tokenizer"]


_DISTINCT = {each.splits: name for name, each in PRE_TOKENIZERS.items()}


@pytest.mark.parametrize("splits", _DISTINCT, ids=_DISTINCT.values())
def test_every_way_of_cutting_gives_the_library_s_ids(
    ask: Ask, trained: dict[str, Any], texts: list[str], splits: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    model = {**trained["model"], "ignore_merges": PRE_TOKENIZERS[_DISTINCT[splits]].ignore_merges}
    path.write_text(json.dumps({**trained, "model": model, "pre_tokenizer": cuts(*splits)}), encoding="utf-8")
    same_ids(ask, path, texts)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(False), pre_tokenizers.ByteLevel(add_prefix_space=True)]),
    ],
)
def test_steps_of_hugging_face_folders(
    ask: Ask, trained: dict[str, Any], texts: list[str], pre_tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**trained, "pre_tokenizer": _as_json(pre_tokenizer)}), encoding="utf-8")
    same_ids(ask, path, texts)


@pytest.mark.model
def test_a_real_tokenizer(ask: Ask, smollm2_artifact: Callable[..., Path], texts: list[str], root: Path) -> None:
    long = (root / "README.md").read_text(encoding="utf-8")
    same_ids(ask, smollm2_artifact() / "tokenizer.json", [*texts, long, "a" * 3000])


def test_sentencepiece_texts_are_written(ask: Ask, script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(script("tests/runtime/conftest.py").tokenizer_json("fallback"))
    tokenizer, shuffled = Tokenizer(path.read_bytes()), random.Random(0)
    known = [i for i in range(420) if "\0" not in tokenizer.decode([i])]  # which ends what the probe writes
    rows = [shuffled.choices(known, k=30) for _ in range(50)]
    lines = "\n".join([*(" ".join(map(str, row)) for row in rows), ""])
    assert ask("decode", path, given=lines.encode()).decode().split("\0")[:-1] == [tokenizer.decode(r) for r in rows]


def changed(document: dict[str, Any], *keys: str, to: Any) -> dict[str, Any]:
    """The document with what `keys` lead to replaced."""
    head, *rest = keys
    return {**document, head: changed(document[head], *rest, to=to) if rest else to}


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (["normalizer"], {"type": "NFC"}, "a normalizer"),
        (["model", "type"], "Unigram", "no BPE"),
        (["model", "dropout"], 0.1, "dropout"),
        (["model", "merges"], [["a"]], "no pair"),
        (["model", "merges"], [["a", "\u4e00"]], "not in the vocabulary"),
        (["pre_tokenizer"], {"type": "Whitespace"}, "Whitespace"),
        (["pre_tokenizer"], None, "does not end in bytes"),
        (["pre_tokenizer"], cuts(r"a*"), "regular expression"),
        (["pre_tokenizer"], cuts(r"(a|b)c"), "regular expression"),
        (["pre_tokenizer"], cuts(r"\p{Thai}"), "regular expression"),
        (["pre_tokenizer"], cuts(r"a+?"), "regular expression"),
        (["added_tokens"], [{"id": 0, "content": "<s>", "special": True}], "numbered"),
        (["added_tokens"], [{"id": 1200, "content": "x y", "special": True, "lstrip": True}], "lstrip"),
    ],
)
def test_what_is_not_done_exactly_is_refused_by_name(
    native: Path, trained: dict[str, Any], keys: list[str], value: Any, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed(trained, *keys, to=value)), encoding="utf-8")
    probe = [native / "llmc" / "native_probe", "encode", path]
    done = subprocess.run(probe, input=b"text\0", capture_output=True, timeout=60)
    assert done.returncode == 1
    assert says in done.stdout.decode()


def test_an_expression_without_end_ends(native: Path, trained: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed(trained, "pre_tokenizer", to=cuts("a+" * 20 + "b"))), encoding="utf-8")
    probe = [native / "llmc" / "native_probe", "encode", path]
    done = subprocess.run(probe, input=b"a" * 3000 + b"\0", capture_output=True, timeout=60)
    assert "sensible time" in done.stdout.decode()
