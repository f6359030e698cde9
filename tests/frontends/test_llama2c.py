"""Checkpoints of llama2.c, written here as its export.py does, and their tokenizers."""

from __future__ import annotations

import io
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmc.compiler.errors import LlmcError, SourceError
from llmc.frontends.source import open_model
from llmc.frontends.tokenizers.sentencepiece_model import read_model

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 340, 64, 160, 2, 4, 2, 256
TEXTS = [
    "",
    "Hello world",
    "The quick  brown fox, 123!",
    " leading and trailing ",
    "naïve café 🦙 日本語",
    "\n\ttabs\n\n",
    "a",
    "x" * 50,
    "<0x41> is text",
]

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """A tokenizer as llama2.c trains them (tinystories.py), but leaving spaces alone, as its run.c does."""
    return train(remove_extra_whitespaces=False)


def train(**options: Any) -> Any:
    library = pytest.importorskip("sentencepiece")
    lines = ["The quick brown fox jumps over the lazy dog. ", "Hello world, hello again! 1 2 3"]
    model = io.BytesIO()
    defaults = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20), model_writer=model, vocab_size=VOCAB, character_coverage=1.0,
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2, hard_vocab_limit=False,
        **(defaults | options),
    )  # fmt: skip
    return library.SentencePieceProcessor(model_proto=model.getvalue())


def tokenizer_bin(model: Any) -> bytes:
    """What llama2.c's tokenizer.py exports."""
    texts = [model.id_to_piece(i) for i in range(model.vocab_size())]
    texts[1:3] = ["\n<s>\n", "\n</s>\n"]
    raw = [text.replace("\u2581", " ").encode() for text in texts]
    body = [struct.pack("<fI", model.get_score(i), len(text)) + text for i, text in enumerate(raw)]
    return struct.pack("<I", max(map(len, raw))) + b"".join(body)


def per_layer(name: str, arrays: Arrays) -> list[np.ndarray]:
    return [arrays[f"layers.{layer}.{name}"] for layer in range(LAYERS)]


def checkpoint(arrays: Arrays, version: int, tied: bool) -> bytes:
    """As `legacy_export` and `version1_export` write it; `arrays` by our names."""
    attention = [array for x in "qkvo" for array in per_layer(x, arrays)]
    mlp = [array for x in ("gate", "down", "up") for array in per_layer(x, arrays)]
    norms = per_layer("attention_norm", arrays), per_layer("mlp_norm", arrays)
    last = [] if tied else [arrays["head"]]
    if version == 0:
        sizes = (HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB if tied else -VOCAB, CONTEXT)
        head = struct.pack("<7i", *sizes)
        rope = np.full((2, CONTEXT, HIDDEN // HEADS // 2), np.nan, np.float32)  # nobody reads it
        order = [
            arrays["embedding"], *norms[0], *attention, *norms[1], *mlp, arrays["final_norm"], rope, *last,
        ]  # fmt: skip
    else:
        sizes = (HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT)
        head = (struct.pack("<Ii7iB", 0x616B3432, version, *sizes, tied)).ljust(256, b"\0")
        order = [*norms[0], *norms[1], arrays["final_norm"], arrays["embedding"], *attention, *mlp, *last]
    return head + b"".join(array.astype("<f4").tobytes() for array in order)


def random_arrays() -> Arrays:
    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCAB, HIDDEN), "final_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "attention_norm": (HIDDEN,), "q": (HIDDEN, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN),
                "o": (HIDDEN, HIDDEN), "mlp_norm": (HIDDEN,), "gate": (FFN, HIDDEN), "down": (HIDDEN, FFN),
                "up": (FFN, HIDDEN),
            }.items()
        }  # fmt: skip
    shapes["head"] = (VOCAB, HIDDEN)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def write(tmp_path: Path, sentencepiece: Any) -> Callable[..., Path]:
    """A function `(version, tied, arrays) -> path` of a checkpoint with its tokenizer.bin beside it."""

    def make(version: int = 1, tied: bool = False, arrays: Arrays | None = None) -> Path:
        (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(sentencepiece))
        path = tmp_path / "stories.bin"
        path.write_bytes(checkpoint(arrays or random_arrays(), version, tied))
        return path

    return make


def refusal(path: Path) -> str:
    with pytest.raises(LlmcError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_every_weight_is_read(write: Callable[..., Path], version: int, tied: bool) -> None:
    arrays = random_arrays()
    with open_model(write(version, tied, arrays)) as source:
        assert source.spec.name == "stories"
        assert source.spec.head.tied == tied
        assert set(source.tensors) == set(arrays) - ({"head"} if tied else set())
        for name, tensor in source.tensors.items():
            np.testing.assert_array_equal(tensor.read(), arrays[name])
        spec = source.spec
        assert (spec.tokens.bos, spec.tokens.eos, spec.tokens.add_bos) == (1, (1, 2), True)
        assert (spec.position.layout, spec.norm.eps, spec.attention.head_dim) == ("interleaved", 1e-5, 16)
        assert source.chat_template is None


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from transformers' halves to pairs, the other way round than llama2.c's `hf_export`."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(0, 2, 1, 3).reshape(weight.shape)


@pytest.mark.parametrize("version", [0, 1])
def test_it_computes_what_transformers_does(
    tiny_llama: Callable[..., Path], write: Callable[..., Path], tmp_path: Path, version: int
) -> None:
    """The same weights in the layout of either, compiled in float32."""
    from safetensors.numpy import load_file

    import llmc
    from llmc.compiler.driver import compile_model

    sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
    from reference import logits, saved_reference

    from llmc.runtime.runner import Feed

    folder = tiny_llama(vocab_size=VOCAB)
    state = load_file(folder / "model.safetensors")
    arrays = {
        "embedding": state["model.embed_tokens.weight"],
        "final_norm": state["model.norm.weight"],
        "head": state["lm_head.weight"],
    }
    names = {
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
        "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
        "up": "mlp.up_proj", "down": "mlp.down_proj",
    }  # fmt: skip
    for layer in range(LAYERS):
        for ours, theirs in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"q": HEADS, "k": KV_HEADS}.get(ours)
            arrays[f"layers.{layer}.{ours}"] = pairs(weight, heads) if heads else weight
    artifact = tmp_path / "x.llmc"
    compile_model(str(write(version, False, arrays)), str(artifact), quant="f32", kv="f32")
    ids = [1, *range(5, 40)]
    with llmc.load(artifact) as model:
        sequence = model.runner.new_sequence()
        found = model.runner.step([Feed(sequence, ids, "all")]).logits
        np.testing.assert_allclose(found, logits(saved_reference(folder), ids), atol=1e-3)


@pytest.mark.parametrize("file", ["tokenizer.bin", "tokenizer.model"])
def test_ids_are_those_of_sentencepiece(write: Callable[..., Path], sentencepiece: Any, file: str) -> None:
    path = write()
    if file == "tokenizer.model":
        (path.parent / "tokenizer.bin").unlink()
        (path.parent / file).write_bytes(sentencepiece.serialized_model_proto())
    with open_model(path) as source:
        tokenizer = Tokenizer.from_buffer(source.tokenizer_json)
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert ids == sentencepiece.encode(text)
            assert tokenizer.decode(ids) == text
        assert [tokenizer.token_to_id(token) for token in ("<unk>", "<s>", "</s>")] == [0, 1, 2]
        assert tokenizer.decode([1, 2]) == ""


def test_both_files_make_one_tokenizer(sentencepiece: Any) -> None:
    from llmc.frontends.llama2c.tokenizer import _read_bin

    plain = _read_bin(tokenizer_bin(sentencepiece))
    assert plain == read_model(sentencepiece.serialized_model_proto())


def test_the_files_beside_it(write: Callable[..., Path], sentencepiece: Any, tmp_path: Path) -> None:
    path = write()
    data = tokenizer_bin(sentencepiece)
    tokens = tmp_path / "tokenizer.bin"
    cases = {
        b"": "0 tokens|token 0 is None",
        data[:-1]: "token 339 of . bytes",
        data[: data.index(b"<0x05>")]: "token 8 of 6 bytes",
        data[:4] + data[4:].replace(b"<unk>", b"<xxx>"): "token 0 is '<xxx>', wanted '<unk>'",
        data.replace(b"<0x05>", b"<0x5a>"): "token 8 is '<0x5a>', wanted '<0x05>'",
        data + struct.pack("<fI", 0, 5) + b"extra": "341 tokens, but the model has 340",
        data + struct.pack("<fI", 0, 1 << 31): "token 340 of 2147483648 bytes",
        data + struct.pack("<fI", 0, 0): "token 340 of 0 bytes",
        data + struct.pack("<fI", 0, 1) + b"\xff": "is not UTF-8",
        data + b"1234567": "ends within token 340",
        struct.pack("<I", 9) + struct.pack("<f", float("nan")) + data[8:]: "wanted 340 finite",
    }
    for changed, message in cases.items():
        tokens.write_bytes(changed)
        with pytest.raises(SourceError, match=f"tokenizer.bin: .*({message})"):
            open_model(path)
    tokens.unlink()
    assert "no tokenizer.bin or tokenizer.model beside it" in refusal(path)
    (tmp_path / "outside").mkdir()
    shutil.move(path, tmp_path / "outside")
    tokens.write_bytes(data)
    (tmp_path / "outside" / "tokenizer.bin").symlink_to(tokens)
    assert "a link that leaves the folder" in refusal(tmp_path / "outside" / "stories.bin")
    assert "not a checkpoint of llama2.c" in refusal(tokens)


def test_headers_that_are_refused(write: Callable[..., Path]) -> None:
    path = write(1)
    one = path.read_bytes()
    zero = write(0).read_bytes()

    def refused(data: bytes) -> str:
        path.write_bytes(data)
        return refusal(path)

    def number(data: bytes, at: int, value: int) -> bytes:
        return data[:at] + struct.pack("<i", value) + data[at + 4 :]

    assert "wanted at least 28" in refused(one[:20])
    assert "but the file has 200" in refused(one[:200])
    assert f"wanted {len(one)} for what its header says" in refused(one[:-4])
    assert f"wanted {len(zero)} for" in refused(zero + b"\0")
    assert "version 2 (its numbers are quantized), llmc reads 0 and 1" in refused(number(one, 4, 2))
    assert "version 7, llmc" in refused(number(one, 4, 7))
    assert "more than version 1 knows" in refused(one[:100] + b"\1" + one[101:])
    assert "more than version 1 knows" in refused(one[:36] + b"\2" + one[37:])
    assert "give the folder it is in" in refused(b"PK\3\4" + one)
    assert "give the folder it is in" in refused(b"\x80\x02\x8a\n" + one)
    fields = {"hidden": 0, "ffn": 4, "layers": 8, "heads": 12, "kv_heads": 16, "vocab": 20, "context": 24}
    for name, at in fields.items():
        for value in (0, -1, -(1 << 31), (1 << 31) - 1):
            if (name, value) == ("vocab", -1):
                continue  # a vocabulary of one, with a head of its own
            message = refused(number(zero, at, value))
            assert f"{name} = " in message or "bytes, wanted" in message
            assert f"{name} = {value}" in refused(number(one, 8 + at, value)) or value == (1 << 31) - 1
    assert "64 numbers for 5 heads" in refused(number(one, 8 + 12, 5))
    assert "of keys, wanted whole shares" in refused(number(one, 8 + 16, 3))
    assert "bytes, wanted" in refused(number(one, 8 + 8, 3))


def test_a_gguf_file_may_be_called_bin(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_gguf().rename(tmp_path / "model.bin")
    open_model(path).close()


FUZZ = settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EDITS = st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=4)), max_size=3)


@FUZZ
@given(version=st.integers(0, 1), edits=EDITS, cut=st.none() | st.integers(0, 300))
def test_random_damage(
    write: Callable[..., Path], version: int, edits: list[tuple[int, bytes]], cut: int | None
) -> None:
    path = write(version)
    data = bytearray(path.read_bytes())
    for at, patch in edits:
        data[at : at + len(patch)] = patch
    path.write_bytes(bytes(data[:cut]))
    try:
        with open_model(path) as source:
            for tensor in source.tensors.values():
                assert tensor.read().shape == tensor.shape
    except LlmcError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right


@FUZZ
@given(kind=st.booleans(), edits=EDITS, place=st.floats(0, 1), cut=st.none() | st.floats(0, 1))
def test_random_damage_of_the_tokenizer(
    write: Callable[..., Path],
    sentencepiece: Any,
    kind: bool,
    edits: list[tuple[int, bytes]],
    place: float,
    cut: float | None,
) -> None:
    path = write()
    tokens = path.parent / "tokenizer.bin"
    data = bytearray(tokens.read_bytes() if kind else sentencepiece.serialized_model_proto())
    start = int(place * len(data))
    for at, patch in edits:
        data[start + at : start + at + len(patch)] = patch
    whole = bytes(data if cut is None else data[: int(cut * len(data))])
    if not kind:
        tokens.unlink()
        tokens = tokens.with_suffix(".model")
    tokens.write_bytes(whole)
    try:
        open_model(path).close()
    except LlmcError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
    finally:
        tokens.unlink()
