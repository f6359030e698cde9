"""What every translator's test compares with transformers: what the encoder gives, logits, answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

import llmc
from llmc.runtime.cache.pages import Sequence
from llmc.runtime.model import Model
from llmc.runtime.runner import Feed

ANSWER = 32
TOLERANCE = 1e-4
SOURCES = [37, 5, 18]  # tokens


def twin_of(folder: Path) -> PreTrainedModel:
    """The model of transformers."""
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def check_translator(artifact: Path, twin: PreTrainedModel, seed: int) -> None:
    """Sources of random ids, which end with 2, alone and in a batch."""
    vocab = twin.config.vocab_size
    random = np.random.default_rng(seed)
    sources = [[*random.integers(5, vocab, count - 1).tolist(), 2] for count in SOURCES]
    with llmc.load(artifact) as model:
        answers = [_check(model, twin, source) for source in sources]
        batch = model.generate_batch(sources, max_tokens=ANSWER, ignore_eos=True)
        assert [answer.ids for answer in batch] == answers


def _check(model: Model, twin: PreTrainedModel, source: list[int]) -> Any:
    """One source's answer, after everything about it was found to be what the twin computes."""
    runner = model.runner
    made = model.generate(source, max_tokens=ANSWER, ignore_eos=True)
    expected = generated(twin, source)
    lead = len(expected) - ANSWER
    assert list(made.ids) == expected[lead:]
    with torch.no_grad():
        output = twin(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([expected[:-1]]))
    read = runner.new_sequence()
    runner.encode([(read, source)])
    hidden = output.encoder_last_hidden_state[0].numpy()
    np.testing.assert_allclose(_encoded(model, read, source), hidden, atol=TOLERANCE, rtol=0)
    for chunk in (len(expected), 7, 1):
        answer = runner.new_sequence(read)
        parts = [expected[:-1][i : i + chunk] for i in range(0, len(expected) - 1, chunk)]
        rows = [runner.step([Feed(answer, part, "all")]).logits.copy() for part in parts]
        np.testing.assert_allclose(np.concatenate(rows), output.logits[0].numpy(), atol=TOLERANCE, rtol=0)
        runner.release(answer)
    runner.release(read)
    return made.ids


def _encoded(model: Model, read: Sequence, source: list[int]) -> np.ndarray:
    """(n, C): what the encoder gives for every token of a source that was read into these pages."""
    count, pages = len(source), len(read.pages)
    places = np.arange(count, dtype=np.int32)
    assert model.runner.encode_function is not None
    hidden, _ = model.runner.encode_function(
        np.array(source, np.int32), places, np.zeros(count, np.int32), places,
        np.zeros((1, 2), np.int32), np.array([0, pages], np.int32), np.array(read.pages, np.int32), places,
    )  # fmt: skip
    return np.array(hidden)


def generated(twin: PreTrainedModel, source: list[int]) -> list[int]:
    """What transformers generates: the first token, those that are forced, then ANSWER of its own."""
    config = twin.generation_config
    forced = [] if config.forced_bos_token_id is None else [config.forced_bos_token_id]
    config.forced_eos_token_id = None
    count = len(forced) + ANSWER
    with torch.no_grad():
        ids = twin.generate(
            torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=count, min_new_tokens=count,
            eos_token_id=twin.config.vocab_size + 1, encoder_no_repeat_ngram_size=0, no_repeat_ngram_size=0,
            use_cache=False,
        )  # fmt: skip
    made: list[int] = ids[0].tolist()
    assert made[1 : 1 + len(forced)] == forced
    return made
