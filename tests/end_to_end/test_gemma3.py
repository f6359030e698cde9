"""Gemma 3 270M from its GGUF file: what transformers computes, past the window too, and llama.cpp's token ids.

Skipped unless the model is in the cache folder (tests/bench/fetch_gemma3.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Gemma3ForCausalLM

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.spec import Embedding, Window, from_toml, to_toml
from llmc.frontends.source import open_model
from llmc.runtime.model import Model
from llmc.runtime.runner import Feed

sys.path.insert(0, str(Path(__file__).parent))
from prompts import PROMPTS
from reference import gemma3_reference, is_greedy, logits

pytestmark = pytest.mark.model

# What llama_cpp.Llama(vocab_only=True).tokenize(text, add_bos=False, special=True) gives of 0.3.36 for this file.
IDS: dict[str, list[int]] = {
    "": [],
    " ": [236743],
    "Hello world": [9259, 1902],
    " leading, trailing ": [5830, 236764, 45330, 236743],
    "1234567890 12 3.14 1,000": [
        236770, 236778, 236800, 236812, 236810, 236825, 236832, 236828, 236819, 236771, 236743, 236770, 236778,
        236743, 236800, 236761, 236770, 236812, 236743, 236770, 236764, 236771, 236771, 236771,
    ],
    "a1b22c333": [236746, 236770, 236763, 236778, 236778, 236755, 236800, 236800, 236800],
    "½ ² Ⅳ ٣٤٥ 五": [238612, 145191, 236743, 246715, 223766, 242090, 242323, 90150],
    "🦙🚀😶\u200d🌫️ 👨\u200d👩\u200d👧\u200d👦 🇫🇷": [
        478, 397, 404, 391, 242015, 247717, 237243, 248989, 238178, 236743, 243874, 237243, 243767, 237243, 244814,
        237243, 244990, 236743, 246598, 242644,
    ],
    "我想在apple工作1314151天～ 日本語 한국어": [
        62133, 237075, 17641, 11700, 236770, 236800, 236770, 236812, 236770, 236810, 236770, 237471, 238352, 33375,
        238582, 50413, 237430,
    ],
    "مرحبا بالعالم नमस्ते Cửa Việt": [236873, 150345, 107602, 17193, 173040, 565, 29719, 33154],
    "\x01\x1f\x7f\x85\xa0\u200b\ufeff": [249732, 253998, 251541, 432, 371, 432, 398, 237141, 237922],
    "\t\t  \n\n \r\n x\n\n\n": [255969, 138, 108, 236743, 251, 107, 1123, 109],
    " " * 200 + "x" + " " * 7: [167, 167, 167, 167, 167, 167, 150, 236781, 143],
    "\n" * 33: [137, 108],
    "def f(x):\n\treturn x**2  # squared\n\n\n    if y != {'k': [1]}:\n": [
        2063, 517, 236769, 236781, 1473, 107, 255968, 2060, 1123, 1018, 236778, 138, 236865, 20218, 109, 140, 584,
        570, 2843, 16923, 236767, 2632, 870, 236770, 236842, 7493, 107,
    ],
    "y'all 'S 'LL it's I'm don’t 'ſ": [
        236762, 236789, 712, 756, 236773, 756, 2182, 625, 236789, 236751, 564, 236789, 236757, 1537, 236858, 236745,
        756, 238071,
    ],
    "é é ﬁ Å \U0010ffff": [236744, 238288, 1559, 97940, 44667, 236743, 482, 381, 429, 429],
    "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n": [105, 2364, 107, 9259, 106, 107, 105, 4368, 107],
    "<table><tr><td>1</td></tr></table> <h1>x</h1>": [168, 173, 175, 236770, 183, 181, 176, 236743, 184, 236781, 191],
    "https://example.org/?q=a%20b&c=d#e": [
        2574, 1411, 8358, 236761, 2187, 23438, 236809, 236784, 236746, 236908, 236778, 236771, 236763, 236880, 236755,
        236784, 236753, 236865, 236744,
    ],
    "The quick brown fox jumps over the lazy dog.": [818, 3823, 8864, 37423, 38167, 1024, 506, 31770, 4799, 236761],
    "   three spaces, then    four": [139, 19891, 9952, 236764, 1299, 140, 19025],
    "<0x0A> <bos> x <unused5>": [236820, 236771, 236781, 236771, 236776, 236813, 236743, 2, 1123, 236743, 11],
    "[multimodal] a[multimodal]b": [5, 496, 5, 236763],
    "naïve café — “quotes” … ½": [1789, 238527, 560, 33443, 2192, 999, 52231, 236919, 7881, 47041],
    "\n\n\n text \t\t\t tab": [109, 1816, 236743, 255970, 6937],
}  # fmt: skip


@pytest.fixture(scope="module")
def artifact(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("gemma3") / "gemma3.llmc"
    compile_model(gemma3_gguf, path, quant="f32")
    with llmc.load(path) as model:
        yield model


@pytest.fixture(scope="module")
def twin(gemma3_gguf: Path) -> Gemma3ForCausalLM:
    return gemma3_reference(gemma3_gguf)


def test_the_spec_says_what_the_file_leaves_out(gemma3_gguf: Path) -> None:
    with open_model(gemma3_gguf) as source:
        spec = source.spec
    whole = tuple(i for i in range(18) if i % 6 != 5)
    assert spec.window == Window(size=512, layers=whole, theta=10000.0)
    assert spec.embedding == Embedding(scale=640**0.5)
    assert (spec.position.theta, spec.attention.head_dim, spec.attention.scale) == (1e6, 256, 1 / 16)
    assert (spec.norm.place, spec.norm.weight, spec.attention.qk_norm) == ("sandwich", "plain", "head")
    assert (spec.tokens.bos, spec.tokens.eos, spec.tokens.add_bos) == (2, (1,), True)
    assert from_toml(to_toml(spec)) == spec


def test_token_ids_are_those_of_llama_cpp(gemma3_gguf: Path) -> None:
    with open_model(gemma3_gguf) as source:
        tokenizer = Tokenizer.from_buffer(source.tokenizer_json)
    for text, wanted in IDS.items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == wanted, text
        assert tokenizer.decode(wanted, skip_special_tokens=False) == text


def test_greedy_tokens_and_logits_are_those_of_transformers(artifact: Model, twin: Gemma3ForCausalLM) -> None:
    for prompt in PROMPTS:
        made = artifact.generate(prompt, max_tokens=16, ignore_eos=True)
        whole = [*made.prompt_ids, *made.ids]
        expected = logits(twin, whole)
        assert is_greedy(expected, list(made.prompt_ids), list(made.ids)), prompt
        sequence = artifact.runner.new_sequence()
        got = artifact.runner.step([Feed(sequence, whole, "all")]).logits
        np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
        artifact.runner.release(sequence)


def test_texts_longer_than_the_window(artifact: Model, twin: Gemma3ForCausalLM) -> None:
    """Fed in chunks; compared after each, and token for token at the end."""
    text = "".join(f"{n}. {prompt}\n" for n, prompt in enumerate(PROMPTS * 8))
    ids = list(artifact.encode(text))[:900]
    assert len(ids) == 900
    made = list(artifact.generate(ids, max_tokens=24, ignore_eos=True).ids)
    whole = [*ids, *made]
    ends = [*range(74, 900, 75), *range(900, len(whole))]  # the last row of each chunk
    with torch.no_grad():
        expected = twin(torch.tensor([whole]), logits_to_keep=torch.tensor(ends)).logits[0].numpy()
    assert expected[ends.index(899) : -1].argmax(-1).tolist() == made
    sequence = artifact.runner.new_sequence()
    start = 0
    for end, wanted in zip(ends, expected, strict=True):
        got = artifact.runner.step([Feed(sequence, whole[start : end + 1], "last")]).logits[0]
        np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max(), err_msg=str(end))
        start = end + 1
    artifact.runner.release(sequence)
