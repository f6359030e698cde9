"""A printable name for a model from whatever its file or folder is called."""

from __future__ import annotations

from pathlib import Path

from llmc.compiler.spec import NAME_LIMIT


def clean_name(text: str) -> str:
    """`text` without what cannot be printed, never empty.

    >>> clean_name("tiny\\x1b[31m")
    'tiny?[31m'
    """
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown[:NAME_LIMIT].strip() or "model"


def folder_name(folder: Path) -> str:
    """A printable name for the model in a folder; of one in the Hugging Face cache the repository's.

    >>> folder_name(Path("/cache/models--org--tiny/snapshots/0a1b2c"))
    'tiny'
    """
    place = folder.resolve()
    repository = place.parent.parent.name
    if place.parent.name == "snapshots" and repository.startswith("models--"):
        return clean_name(repository.rsplit("--", 1)[-1])
    return clean_name(place.name)
