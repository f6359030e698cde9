"""SentencePiece's precompiled_charsmap -> steps of a tokenizer.json that change a text as SentencePiece does.

Format (https://github.com/google/sentencepiece/blob/master/src/normalizer.cc): the bytes of a trie (uint32), the trie
as a double array of uint32 units (https://github.com/s-yata/darts-clone), then the replacements, each ended by a zero
byte. The longest key that a text goes on with is replaced.

The library's own step, Precompiled, looks a whole grapheme up and takes the shortest key it begins with: it drops the
accent after a ligature, and leaves a letter and an accent of six bytes apart. So the map is told in the steps that are
exact: Unicode's NFKC, which nearly all of these maps are, and before it the characters that they treat otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, normalizers

from llmc.compiler.errors import SourceError

MAX_BYTES = 16 << 20
_MAX_KEY = 48  # bytes
_MAX_SHARED = 16  # nodes for each unit: keys share their ends, so a short damaged trie can spell any number of them
_CHUNK = 2048  # trie nodes whose 255 possible children are looked at together
_LABEL = np.uint32(0x800000FF)  # a unit's label, and the bit that makes it a value instead
_MAX_GROUPS = 256
_CHECKED = 2000  # keys of several characters, spread over the map
_TOLERATED = 0.02  # of these; they hold characters that are newer than the library's NFKC
_NOTHING = "\ufdd0"  # a noncharacter: in no piece, so unknown as what it stands for
# More of them, one for each character that is put aside while NFKC works.
_KEEPS = [chr(plane << 16 | last) for plane in range(1, 17) for last in (0xFFFE, 0xFFFF)]
_PLANES = [*range(0xD800), *range(0xE000, 0x30000), *range(0xE0000, 0xE1000)]  # all others have no letters


def read_charsmap(data: bytes) -> dict[str, str]:
    """Key -> replacement. Raises SourceError for a damaged one."""
    if not data:
        return {}
    if not 4 < len(data) <= MAX_BYTES:
        raise _damaged(f"{len(data)} bytes, wanted 5 to {MAX_BYTES}")
    size = struct.unpack_from("<I", data)[0]
    if size % 4 or not 4 <= size <= len(data) - 4:
        raise _damaged(f"a trie of {size} bytes in {len(data)}")
    units = np.frombuffer(data, "<u4", size // 4, 4)
    replacements = data[4 + size :]
    found = {}
    for key, value in _walk(units):
        end = replacements.find(b"\0", value)
        if value >= len(replacements) or end < 0:
            raise _damaged(f"a replacement at {value} of {len(replacements)} bytes")
        try:
            found[key.decode()] = replacements[value:end].decode()
        except UnicodeDecodeError:
            raise _damaged("a text that is not UTF-8") from None
    return found


def normalizer_steps(data: bytes, pieces: Collection[str], byte_fallback: bool) -> list[Any]:
    """The steps that do what the map does to a text of a model with these pieces."""
    if not data:
        return []
    told = _in_steps(data)
    alphabet = set("".join(pieces))
    alike = [c for c in told.kept if c not in alphabet and not byte_fallback]  # unknown whatever they become
    single = [c for c in told.kept if c in alphabet or byte_fallback]
    if not told.near or len(told.groups) > _MAX_GROUPS or len(single) > len(_KEEPS):
        # A map of another kind: what Unicode has as one character is joined first.
        return [normalizers.NFKC() if told.after_nfkc else normalizers.NFC(), normalizers.Precompiled(data)]
    steps = [normalizers.Replace(_any_of(group), target) for target, group in told.groups]
    if alike:
        steps.append(normalizers.Replace(_any_of("".join(alike)), _NOTHING))
    swaps = list(zip(single, _KEEPS, strict=False))
    there = [normalizers.Replace(character, keep) for character, keep in swaps]
    return [*steps, *there, normalizers.NFKC(), *(normalizers.Replace(keep, character) for character, keep in swaps)]


@dataclass(frozen=True)
class _Told:
    """A map beside NFKC: (replacement, the characters it is for), the characters that the map leaves as they are,
    whether it does the same to all else, and whether it does what it does to a text that NFKC changed before."""

    groups: tuple[tuple[str, str], ...]
    kept: tuple[str, ...]
    near: bool
    after_nfkc: bool


@lru_cache(maxsize=4)  # models share their maps, and one takes seconds
def _in_steps(data: bytes) -> _Told:
    table, nfkc = read_charsmap(data), normalizers.NFKC()
    groups: dict[str, str] = {}
    kept = []
    for character in map(chr, _PLANES):
        wanted = table.get(character, character)
        if wanted == nfkc.normalize_str(character):
            continue
        if wanted == character:
            kept.append(character)
        else:
            groups[wanted] = groups.get(wanted, "") + character
    aside = {*kept, *"".join(groups.values())}
    keys = [key for key in table if len(key) > 1]
    keys = keys[:: len(keys) // _CHECKED + 1]
    there = [key for key in keys if not aside & set(key)]
    near = sum(nfkc.normalize_str(key) != table[key] for key in there) <= _TOLERATED * len(there)
    again = ["".join(table.get(c, c) for c in nfkc.normalize_str(key)) == table[key] for key in keys]
    return _Told(tuple(sorted(groups.items())), tuple(kept), near, sum(again) >= (1 - _TOLERATED) * len(again))


def _any_of(characters: str) -> Regex:
    return Regex("[" + "".join(f"\\x{{{ord(character):x}}}" for character in characters) + "]")


def _walk(units: NDArray[np.uint32]) -> list[tuple[bytes, int]]:
    """Every key of the trie with its value."""
    found: list[tuple[bytes, int]] = []
    places, keys = np.zeros(1, np.uint32), [b""]
    visited = 0
    for _ in range(_MAX_KEY):
        visited += len(keys)
        if visited > _MAX_SHARED * len(units):
            raise _damaged(f"a trie of {visited} nodes or more in {len(units)} units")
        bases = places ^ _offsets(units[places])
        leaf = np.flatnonzero((units[places] >> 8) & 1)
        if (bases[leaf] >= len(units)).any():
            raise _damaged("a trie that leads outside")
        values = units[bases[leaf]] & 0x7FFFFFFF
        found += [(keys[node], int(value)) for node, value in zip(leaf, values, strict=True)]
        places, keys = _children(units, bases, keys)
        if not keys:
            return found
    raise _damaged(f"a key of more than {_MAX_KEY} bytes")


def _children(units: NDArray[np.uint32], bases: NDArray[np.uint32], keys: list[bytes]) -> tuple[Any, list[bytes]]:
    labels = np.arange(1, 256, dtype=np.uint32)
    places, names = [], []
    for at in range(0, len(keys), _CHUNK):
        children = bases[at : at + _CHUNK, None] ^ labels
        inside = children < len(units)
        there = inside & ((units[np.where(inside, children, 0)] & _LABEL) == labels)
        node, label = np.nonzero(there)
        places.append(children[node, label])
        names += [keys[at + int(i)] + bytes([int(j) + 1]) for i, j in zip(node, label, strict=True)]
    return np.concatenate(places), names


def _offsets(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """How far a node's children are, as darts-clone packs it."""
    return (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))


def _damaged(problem: str) -> SourceError:
    return SourceError(f"precompiled_charsmap is damaged: {problem}")
