"""What kind of character each is to the library tokenizers, as a table for C++.

    python tests/native_categories.py    writes runtime/native/categories.inc

Its regular expressions and its Digits go by different versions of Unicode, so both are asked, not unicodedata.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, pre_tokenizers

TABLE = Path(__file__).resolve().parents[1] / "runtime" / "native" / "categories.inc"
KINDS = ("Lu", "Ll", "Lt", "Lm", "Lo", "M", "N", "P", "S")  # numbered from 1; 0 is anything else
NUMERIC = len(KINDS) + 1  # to Digits alone

# Where Unicode has characters of these kinds. Asking about all the others would take most of the time.
_USED = [*range(0xD800), *range(0xE000, 0x33500), *range(0xE0000, 0xE0200)]
_UNUSED = [*range(0x33500, 0xE0000), *range(0xE0200, 0x110000)]


def characters_of(expression: str, among: list[int]) -> list[int]:
    """Those of `among` that a class of characters holds."""
    cut = pre_tokenizers.Split(Regex(f"[^{expression}]+"), "removed")
    return [ord(c) for piece, _ in cut.pre_tokenize_str("".join(map(chr, among))) for c in piece]


def numeric() -> list[int]:
    """Those that Digits cuts off: they are pieces alone even beside one another."""
    digits = pre_tokenizers.Digits(True)
    text = "".join(f"a{chr(c)}a" for c in _USED)
    return [ord(piece) for piece, _ in digits.pre_tokenize_str(text) if len(piece) == 1 and piece != "a"]


def kinds() -> dict[int, int]:
    """Character -> its number, without the zeros."""
    found = {c: NUMERIC for c in numeric()}
    for number, kind in enumerate(KINDS, 1):
        for c in characters_of(f"\\p{{{kind}}}", _USED):
            assert number == KINDS.index("N") + 1 or c not in found, "Digits takes what is no number"
            found[c] = number
    assert characters_of("".join(f"\\p{{{kind}}}" for kind in KINDS), _UNUSED) == []
    return found


def table() -> str:
    """The text of categories.inc: where each run of characters of one kind begins, times 16, plus its number."""
    found, runs, before = kinds(), [], 0
    for c in _USED:
        kind = found.get(c, 0)
        if kind != before:
            runs.append(f"{c * 16 + kind:#x},")
        before = kind
    lines, line = [f"// Made by `python tests/{Path(__file__).name}`. 1 to {NUMERIC}: {', '.join(KINDS)}, numeric."], ""
    for run in runs:
        if len(line) + len(run) >= 120:
            lines.append(line)
            line = ""
        line += f" {run}" if line else run
    return "\n".join([*lines, line, ""])


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
