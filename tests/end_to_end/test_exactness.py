"""With float32 weights an artifact computes what transformers computes, however the tokens are fed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

import llmc
from llmc.compiler.driver import compile_model
from llmc.frontends.source import open_model
from llmc.runtime.generate import Generation
from llmc.runtime.loading import large_pages, weights
from llmc.runtime.loading.large_pages import LargePages
from llmc.runtime.model import Model

sys.path.insert(0, str(Path(__file__).parent))
from feeding import all_logits
from prompts import PROMPTS
from reference import is_greedy, logits, reference, saved_reference

# (heads, kv heads, head size, MLP width): GQA and not, sizes that no vector length divides.
ODD = [(9, 3, 16, 100), (4, 4, 80, 200), (6, 2, 128, 72), (3, 1, 10, 50)]

# Blocks that Llama has not, for the unlowered graph too: model_type and config. Windows are shorter than the texts.
_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 24, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 40, "query_pre_attn_scalar": 24, "sliding_window": 16, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": _ROPES, "tie_word_embeddings": True,
        },
    ),
    "gemma3 by pattern": ("gemma3_text", {"head_dim": 16, "sliding_window": 33, "num_hidden_layers": 7}),
}  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(smollm2_artifact: Callable[..., Path]) -> Iterator[Model]:
    with llmc.load(smollm2_artifact("f32")) as model:
        yield model


@pytest.fixture(scope="module")
def twin(smollm2_gguf: Path) -> LlamaForCausalLM:
    return reference(smollm2_gguf)


@pytest.fixture(scope="module")
def answers(smollm2: Model) -> list[Generation]:
    return [smollm2.generate(prompt, max_tokens=64, ignore_eos=True) for prompt in PROMPTS]


@pytest.mark.model
def test_smollm2_greedy_tokens_and_logits_are_those_of_transformers(
    smollm2: Model, twin: LlamaForCausalLM, answers: list[Generation]
) -> None:
    for prompt, made in zip(PROMPTS, answers, strict=True):
        assert len(made.ids) == 64
        whole = [*made.prompt_ids, *made.ids]
        expected = logits(twin, whole)
        assert is_greedy(expected, list(made.prompt_ids), list(made.ids)), prompt
        np.testing.assert_allclose(all_logits(smollm2, whole, 512), expected, atol=1e-3)


@pytest.mark.model
@pytest.mark.thorough
def test_smollm2_from_a_safetensors_folder_gives_the_same(
    smollm2: Model, smollm2_gguf: Path, twin: LlamaForCausalLM, answers: list[Generation], tmp_path: Path
) -> None:
    """The same weights with RoPE's halves instead of pairs, written by transformers in two shards."""
    twin.save_pretrained(tmp_path / "hf", max_shard_size="300MB")
    with open_model(smollm2_gguf) as source:
        (tmp_path / "hf" / "tokenizer.json").write_bytes(source.tokenizer_json)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    compile_model(tmp_path / "hf", tmp_path / "hf.llmc", quant="f32")
    with llmc.load(tmp_path / "hf.llmc") as model:
        for prompt, wanted in zip(PROMPTS, answers, strict=True):
            assert model.generate(prompt, max_tokens=64, ignore_eos=True).ids == wanted.ids, prompt
        ids = list(answers[0].prompt_ids) + list(answers[0].ids)
        np.testing.assert_allclose(all_logits(model, ids, 512), all_logits(smollm2, ids, 512), atol=1e-3)


@pytest.mark.model
@pytest.mark.thorough_if(case=lambda quant: quant != "q8")
@pytest.mark.parametrize("quant", ["f32", "q8", "q4", "r8"])
def test_feeding_in_one_go_in_chunks_and_by_token_is_bit_identical(
    quant: str, smollm2_artifact: Callable[..., Path]
) -> None:
    with llmc.load(smollm2_artifact(quant)) as model:
        ids = list(model.encode(PROMPTS[9]))
        whole = all_logits(model, ids, len(ids))
        for chunk in (7, 1):
            np.testing.assert_array_equal(all_logits(model, ids, chunk), whole)
        made = [model.generate(PROMPTS[9], max_tokens=24, prefill_chunk=chunk).ids for chunk in (512, 7, 1)]
        assert made[0] == made[1] == made[2]


@pytest.mark.model
@pytest.mark.parametrize("copied", [None, False])
def test_weights_that_move_while_it_speaks_are_the_same(
    copied: bool | None, smollm2_artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[LargePages] = []

    class Watched(LargePages):
        def worked(self, seconds: float) -> None:
            moved.append(self)
            super().worked(seconds)

    with llmc.load(smollm2_artifact("q8"), copy_weights=True) as model:
        wanted = all_logits(model, model.encode(PROMPTS[9]), 8)
    monkeypatch.setattr(weights, "LargePages", Watched)
    monkeypatch.setattr(large_pages, "_FIRST_S", 0)
    monkeypatch.setattr(large_pages, "_SHARE", 0.5)  # to be done in a few steps,
    monkeypatch.setattr(large_pages, "_FASTER", 0)  # wherever the file lies
    with llmc.load(smollm2_artifact("q8"), copy_weights=copied) as model:
        np.testing.assert_array_equal(all_logits(model, model.encode(PROMPTS[9]), 8), wanted)
        while moved and not moved[0].done:
            model.generate(PROMPTS[9], max_tokens=8, ignore_eos=True)
        np.testing.assert_array_equal(all_logits(model, model.encode(PROMPTS[9]), 8), wanted)
    assert bool(moved) == (copied is None)
    assert not moved or moved[0].copied > 40 or not large_pages._has_large_pages()


@pytest.mark.model
def test_a_rotated_format_loses_less_than_one_as_it_is(smollm2: Model, smollm2_artifact: Callable[..., Path]) -> None:
    """Rounding activations is most of what 8 bits lose: divergence of the next tokens from those of float32 weights."""
    ids = list(smollm2.encode(" ".join(PROMPTS)))
    expected = _log_shares(smollm2, ids)
    lost = {}
    for quant in ("q8", "r8"):
        with llmc.load(smollm2_artifact(quant)) as model:
            lost[quant] = float((np.exp(expected) * (expected - _log_shares(model, ids))).sum(1).mean())
    assert lost["r8"] < 0.75 * lost["q8"] < 0.01, lost


def _log_shares(model: Model, ids: list[int]) -> np.ndarray:
    """(n, V) logarithms of the shares that a model gives each next token."""
    found = all_logits(model, ids, 512).astype(np.float64)
    found -= found.max(1, keepdims=True)
    return found - np.log(np.exp(found).sum(1, keepdims=True))


def test_a_batch_gives_each_prompt_what_it_gets_alone(smollm2: Model) -> None:
    prompts = PROMPTS[:4]
    alone = [smollm2.generate(prompt, max_tokens=32, ignore_eos=True).ids for prompt in prompts]
    together = smollm2.generate_batch(prompts, max_tokens=32, ignore_eos=True)
    assert [made.ids for made in together] == alone


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "ffn"), ODD)
@pytest.mark.parametrize("target", ["cpu", "cpu:baseline"])
def test_odd_sizes_through_a_safetensors_folder(
    heads: int, kv_heads: int, head_dim: int, ffn: int, target: str, tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_llama(
        seed=heads, shards=2 if heads == 9 else 1, tie_word_embeddings=heads % 2 == 0, hidden_size=12 * heads,
        intermediate_size=ffn, num_hidden_layers=3, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, vocab_size=333,
    )  # fmt: skip
    compile_model(folder, tmp_path / "tiny.llmc", quant="f32", target=target)
    ids = np.random.default_rng(heads).integers(3, 333, 41).tolist()
    twin = reference(folder)
    with llmc.load(tmp_path / "tiny.llmc") as model:
        whole = all_logits(model, ids, 41)
        np.testing.assert_allclose(whole, logits(twin, ids), atol=1e-4)
        np.testing.assert_array_equal(all_logits(model, ids, 7), whole)
        made = model.generate(ids, max_tokens=64, ignore_eos=True)
        assert is_greedy(logits(twin, [*ids, *made.ids]), ids, list(made.ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_through_its_folder(family: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model_type, config = FAMILIES[family]
    folder = tiny_model(model_type, seed=len(family), **config)
    compile_model(folder, tmp_path / "tiny.llmc", quant="f32")
    ids = np.random.default_rng(len(family)).integers(3, 320, 70).tolist()
    twin = saved_reference(folder)
    expected = logits(twin, ids)
    with llmc.load(tmp_path / "tiny.llmc") as model:
        whole = all_logits(model, ids, 70)
        np.testing.assert_allclose(whole, expected, atol=1e-4 * np.abs(expected).max())
        np.testing.assert_array_equal(all_logits(model, ids, 7), whole)
        made = model.generate(ids, max_tokens=48, ignore_eos=True)
        assert is_greedy(logits(twin, [*ids, *made.ids]), ids, list(made.ids))
    np.testing.assert_allclose(_unlowered_logits(folder, ids), expected, atol=1e-4 * np.abs(expected).max())


def test_the_unlowered_graph_gives_the_models_logits(tiny_llama: Callable[..., Path]) -> None:
    folder = tiny_llama()
    ids = np.random.default_rng(0).integers(3, 320, 20).tolist()
    np.testing.assert_allclose(_unlowered_logits(folder, ids), logits(reference(folder), ids), atol=1e-4)


def _unlowered_logits(path: Path, ids: list[int]) -> np.ndarray:
    """By no pass and no kernel: Relax and the ops' NumPy meanings alone."""
    import tvm
    from tvm import relax

    from llmc.compiler import ops
    from llmc.compiler.spec import layer_groups
    from llmc.frontends.graph.build import build

    count = len(ids)
    places = np.arange(count, dtype=np.int32)
    with open_model(path) as source:
        spec = source.spec
        weights = [tvm.runtime.tensor(tensor.read()) for tensor in source.tensors.values()]
        ops.register_meanings()
        machine = relax.VirtualMachine(relax.build(build(spec), tvm.target.Target("llvm")), tvm.cpu())
    pages = -(-count // 16)
    page = (pages, 2, spec.attention.kv_heads, 16 * spec.attention.head_dim)
    kv = [tvm.runtime.tensor(np.zeros(page, np.float32)) for _ in range(spec.sizes.layers)]
    own = [np.arange(pages, dtype=np.int32)[::-1].copy()] * len(layer_groups(spec))
    listed = np.zeros((1, 2), np.int32), np.array([0, pages], np.int32), *own
    index = [np.array(ids, np.int32), places, np.zeros(count, np.int32), places, *listed, places]
    got, best, *_ = machine["step"](*map(tvm.runtime.tensor, index), kv, *weights)
    np.testing.assert_array_equal(best.numpy()[:, 0], got.numpy().argmax(-1))
    return np.array(got.numpy())
