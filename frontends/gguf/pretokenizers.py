"""How each byte-level tokenizer cuts a text before its merges, by `tokenizer.ggml.pre`: data only.

Source: llama.cpp's src/llama-vocab.cpp (llm_tokenizer_bpe, and the list of names), with the regular
expressions as the models' own tokenizer.json has them.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`splits`: expressions applied in turn; what they match, and what lies between, are pieces.

    `ignore_merges`: a piece that is a token as a whole is not merged. `add_bos`: whether a text
    starts with bos when the file does not say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_WORDS = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_CL100K % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_CL100K % r"\p{N}",))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _WORDS,
    "mpt": _WORDS,
    "olmo": _WORDS,
    "phi-2": _WORDS,
    "exaone4": _WORDS,
    "gigachat": _WORDS,
    "jais": _WORDS,
    "mellum": _WORDS,
    "modern-bert": _WORDS,
    "trillion": _WORDS,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "command-r": _DIGITS,
    "exaone": _DIGITS,
    "refact": _DIGITS,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "codeshell": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": PreTokenizer(_LLAMA3.splits),
    "chatglm-bpe": PreTokenizer(_LLAMA3.splits),
    "glm4": PreTokenizer(_LLAMA3.splits),
    "smaug-bpe": PreTokenizer(_LLAMA3.splits),
    "deepseek-r1-qwen": _QWEN2,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "qwen35": PreTokenizer((_MARKED,)),
    "hunyuan": _QWEN2,
    "megrez": _QWEN2,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "gpt-4o": PreTokenizer((_CASED,)),
    "llama4": PreTokenizer((_CASED,)),
    "minimax-m2": PreTokenizer((_CASED,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}
