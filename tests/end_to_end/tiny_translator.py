"""A tiny random encoder-decoder, saved as transformers does, with a tokenizer that ends a text with </s>."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_translator(
    folder: Path, model_type: str, config: dict[str, Any], seed: int, languages: tuple[str, ...] = ()
) -> None:
    """`config`: keys of its config. `languages`: special tokens that the tokenizer has besides."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[model_type](**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" in name and not parameter.requires_grad:
                continue  # sines and cosines
            # Norm weights too: a weight of ones would hide a norm that is left out.
            parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5))
            if parameter.ndim == 1:
                parameter.add_(1.0)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    model.save_pretrained(folder)
    if config.get("tie_word_embeddings") is False:
        _with_own_head(folder / "model.safetensors")
    save_tokenizer(folder, config["vocab_size"], languages)


def _with_own_head(path: Path) -> None:
    """As FLAN-T5's files are: transformers ties the head that it saves, but not one that it finds."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    weights = load_file(path)
    path.unlink()
    head = np.random.default_rng(0).standard_normal(weights["shared.weight"].shape).astype(np.float32) / 8
    save_file({**weights, "lm_head.weight": head}, path, metadata={"format": "pt"})


def save_tokenizer(folder: Path, vocab: int, languages: tuple[str, ...]) -> None:
    """A byte-level tokenizer of at most `vocab` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "<s>", "</s>", "<unk>", *languages]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())][:vocab]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
