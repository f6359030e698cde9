"""A printable name for a model from whatever its file or folder is called."""

from __future__ import annotations

from llmc.compiler.spec import NAME_LIMIT


def clean_name(text: str) -> str:
    """`text` without what cannot be printed, never empty.

    >>> clean_name("tiny\\x1b[31m")
    'tiny?[31m'
    """
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown[:NAME_LIMIT].strip() or "model"
