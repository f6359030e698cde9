"""Beam search, penalties and sampling rules against those of transformers, on tiny random models of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from llmc.runtime.decoding.beams import BeamSearch
from llmc.runtime.decoding.candidates import Row, candidates_of_all
from llmc.runtime.decoding.chain import kept, probabilities
from llmc.runtime.decoding.chooser import Chooser
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.penalties import Penalties

VOCAB, ENDS = 16, (3, 7)  # few tokens, so that ends come often
PROMPTS = [[5, 9, 11, 9], [2], [14, 13, 12, 10, 8, 6], [9, 1, 15]]


@pytest.fixture(scope="module")
def decoder() -> Any:
    """A Llama whose logits differ enough that beams overtake each other."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, initializer_range=0.9, bos_token_id=1, eos_token_id=list(ENDS), **sizes)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def translator() -> Any:
    """A T5, whose answers begin with token 0."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    config = T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    model = T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    return model


Step = Callable[[list[list[int]]], Iterable[Any]]


def search(step: Step, lead: list[int], options: Options, ends: Iterable[int]) -> tuple[list[list[int]], list[float]]:
    """Run a search over `step`, which gives logits (V,) of the last token of each text."""
    state = BeamSearch.start(options, lead, VOCAB, options.max_tokens, ends)
    steps = 0
    while not state.done:
        assert all(len(beam.ids) == steps for beam in state.live)
        found = step([[*lead, *beam.ids] for beam in state.live])
        before = state
        state = state.after([Row.of(logits.astype(np.float32), 6) for logits in found])
        for beam in state.live:
            assert beam.ids == (*before.live[beam.parent].ids, beam.token)
        steps += 1
    best = state.best(options.beams)
    return [list(each.ids) for each in best], [each.score for each in best]


WISHES: list[dict[str, Any]] = [
    {"beams": 2},
    {"beams": 4},
    {"beams": 4, "early_stopping": "yes"},
    {"beams": 4, "early_stopping": "never"},
    {"beams": 3, "length_penalty": 0.0},
    {"beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"beams": 3, "length_penalty": -1.0},
    {"beams": 5, "min_tokens": 6, "early_stopping": "yes"},
    {"beams": 4, "repetition_penalty": 1.7},
    {"beams": 4, "banned": [2, 10, 13, 14], "max_tokens": 5},
]


def reference(model: Any, ids: list[int], options: Options) -> tuple[list[list[int]], list[float]]:
    import torch

    stopping = {None: False, "no": False, "yes": True, "never": "never"}[options.early_stopping]
    found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=options.beams,
        num_return_sequences=options.beams,
        max_new_tokens=options.max_tokens,
        min_new_tokens=options.min_tokens or None,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        early_stopping=stopping,
        repetition_penalty=options.repetition_penalty,
        bad_words_ids=[[id_] for id_ in options.banned] or None,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return found.sequences.tolist(), found.sequences_scores.tolist()


def unpadded(ids: list[int], start: int, ends: Iterable[int]) -> list[int]:
    """The answer: what comes after `start`, up to its end token."""
    answer = ids[start:]
    at = next((place for place, id_ in enumerate(answer) if id_ in ends), len(answer) - 1)
    return answer[: at + 1]


@pytest.mark.parametrize("wishes", WISHES, ids=str)
def test_beams_of_a_decoder(decoder: Any, wishes: dict[str, Any]) -> None:
    import torch

    def step(texts: list[list[int]]) -> Iterable[Any]:
        with torch.no_grad():
            return decoder(torch.tensor(texts)).logits[:, -1].numpy()

    options = Options(**{"max_tokens": 14, **wishes})
    for prompt in PROMPTS:
        found, scores = search(step, prompt, options, ENDS)
        sequences, wanted_scores = reference(decoder, prompt, options)
        assert found == [unpadded(ids, len(prompt), ENDS) for ids in sequences]
        np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wishes", WISHES, ids=str)
def test_beams_of_an_encoder_decoder(translator: Any, wishes: dict[str, Any]) -> None:
    import torch

    options = Options(**{"max_tokens": 12, **wishes})
    for prompt in PROMPTS:
        source = torch.tensor([prompt])
        encoded = translator.encoder(source)[0]

        def step(texts: list[list[int]], encoded: Any = encoded) -> Iterable[Any]:
            with torch.no_grad():
                shared = (encoded.expand(len(texts), -1, -1),)
                return translator(decoder_input_ids=torch.tensor(texts), encoder_outputs=shared).logits[:, -1].numpy()

        found, scores = search(step, [0], options, (1,))
        sequences, wanted_scores = reference(translator, prompt, options)
        assert found == [unpadded(ids, 1, (1,)) for ids in sequences]
        np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.4, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 1.1, "typical_p": 0.7},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9},
    ],
    ids=str,
)
def test_sampling_rules(rules: dict[str, Any], seed: int) -> None:
    import torch
    from transformers.generation import logits_process as theirs

    logits = (np.random.default_rng(seed).standard_normal(300) * 3).astype(np.float32)
    options = Options(**rules)
    assert options.temperature is not None
    scores = torch.tensor(logits[None], dtype=torch.float64) / options.temperature
    for name, rule in (
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
        ("min_p", theirs.MinPLogitsWarper),
        ("typical_p", theirs.TypicalLogitsWarper),
    ):
        if name in rules:
            scores = rule(rules[name])(torch.zeros(1, 1, dtype=torch.long), scores)
    wanted = torch.softmax(scores, -1)[0].numpy()
    everything = candidates_of_all(Row.of(logits), Penalties(options, (), 300, (), ()), 300, options.temperature)
    left = kept(everything, options)
    assert left is not None
    found = np.zeros(300)
    found[left.ids] = probabilities(left, options.temperature)
    np.testing.assert_allclose(found, wanted, atol=1e-9)


def test_a_repetition_penalty(decoder: Any) -> None:
    import torch

    prompt = PROMPTS[0]
    found = decoder.generate(
        torch.tensor([prompt]), max_new_tokens=20, repetition_penalty=1.8, do_sample=False, num_beams=1, pad_token_id=0
    )[0].tolist()
    chooser = Chooser(Options(repetition_penalty=1.8), prompt, VOCAB, ENDS)
    said: list[int] = []
    while len(said) < 20 and not (said and said[-1] in ENDS):
        with torch.no_grad():
            logits = decoder(torch.tensor([[*prompt, *said]])).logits[0, -1].numpy()
        choice = chooser.choose(Row.of(logits))
        chooser.accept(choice)
        said.append(choice.token)
    assert said == found[len(prompt) :]
