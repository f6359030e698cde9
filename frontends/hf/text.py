"""What a Hugging Face folder says about text: template, special tokens, generation defaults."""

from __future__ import annotations

from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip

MAX_TEMPLATE = 1 << 20  # characters
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")

# Sampling defaults that the runtime understands -> the values they may have.
_GENERATION = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 24),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def chat_template(tokenizer_config: dict[str, Any], file: str | None) -> str | None:
    """The template in chat_template.jinja (`file`) or else in tokenizer_config.json, or None.

    Of several named ones it is "default".
    """
    template = file if file is not None else tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is None:
        return None
    return check_template(template, "tokenizer_config.json: chat_template")


def check_template(template: Any, label: str) -> str:
    """The template if it is a text of bearable length; the runtime renders it in a sandbox."""
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE:
        raise SourceError(f"{label} is {clip(template)}, wanted a text of at most {MAX_TEMPLATE} characters")
    return template


def special_tokens(tokenizer_config: dict[str, Any], vocab: dict[str, int]) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token -> their texts, those that the model has."""
    texts = {}
    for key in _SPECIAL:
        value = tokenizer_config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str) or text not in vocab:
            raise SourceError(f"tokenizer_config.json: {key} is {clip(text)}, which is not in the tokenizer")
        texts[key] = text
    return texts


def check_extra_tokens(tokenizer_config: dict[str, Any], vocab: dict[str, int]) -> None:
    """Raises SourceError when tokenizer_config.json adds tokens that tokenizer.json lacks."""
    table = tokenizer_config.get("added_tokens_decoder") or {}
    entries = table.items() if isinstance(table, dict) else [("", table)]
    for id_, entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or str(vocab.get(text)) != id_:
            raise SourceError(
                f"tokenizer_config.json: added token {clip(id_)} is {clip(text)}, but not so in "
                "tokenizer.json; save the tokenizer again with transformers"
            )


def generation_defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """Sampling settings that generate() of transformers would use; {} when it would be greedy."""
    if generation.get("do_sample") is not True:
        return {}
    defaults = {}
    for key, (low, high) in _GENERATION.items():
        value = generation.get(key)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # which a NaN is not
            raise SourceError(f"generation_config.json: {key} = {clip(value)}, wanted {low} to {high}")
        if isinstance(low, int) and not isinstance(value, int):
            raise SourceError(f"generation_config.json: {key} = {clip(value)}, wanted a whole number")
        defaults[key] = value
    return defaults
