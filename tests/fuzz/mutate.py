"""Changes to valid inputs: of bytes, of texts, of JSON values. Each takes the random numbers that decide."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

# Numbers at which lengths, counts and offsets go wrong.
EDGES = sorted(
    {0, 1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 64, 100, 255, 256, 257, 4096, 65535, 65536}
    | {(1 << bits) + more for bits in (24, 31, 32, 53, 60, 61, 62, 63, 64) for more in (-2, -1, 0, 1)}
)
_WORDS = (
    b"../x", b"/etc/passwd", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"{", b"[", b'"', b"\\u0000", b"\\ud800",
    b"1e999", b"-0", b"NaN", b"null", b"GGUF", b"PK\x03\x04", b"PK\x05\x06", b"\x80\x02", b"cos\nsystem\n", b"R", b".",
    b"torch\nFloatStorage\n", b"__import__", b"{{", b"%s", b"[[x]]", b"'''", b'"""', b"x.y.z = 1", b"| transposed",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 64, 1 << 20, (1 << 24) + 1, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30,
    10**400, 0.0, -0.0, 0.5, 1.5, -1.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "\x00",
    "\u2028", "../x", "/etc/passwd", "a/../../b", "\ud800", "default", "yarn", "silu", "{layer}", "{expert}", "rope",
    "None", "1" * 5000, [], {}, [0], [1, 2], [[]], [None], {"": 0}, [1e400] * 3, ["a"] * 100, list(range(300)),
    {"rope_type": "yarn"}, {"x": {"y": {}}}, [[[[[]]]]], {"auto_map": {"AutoModel": "x.Y"}},
)  # fmt: skip


def change_bytes(random: Random, samples: Sequence[bytes]) -> bytes:
    """One of the samples with one to a few changes: bits, numbers, pieces cut, doubled, moved or of another sample."""
    data = bytearray(random.choice(samples))
    for _ in range(min(random.choice((1, 1, 1, 2, 2, 3, 4, 8)), len(data))):
        if not data:
            break
        at = random.randrange(len(data))
        _BYTE_CHANGES[random.randrange(len(_BYTE_CHANGES))](random, data, at, samples)
    return bytes(data)


def _flip(random: Random, data: bytearray, at: int, _: Sequence[bytes]) -> None:
    data[at] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray, at: int, _: Sequence[bytes]) -> None:
    data[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))


def _number(random: Random, data: bytearray, at: int, _: Sequence[bytes]) -> None:
    """A little-endian number in place of what is there."""
    width = random.choice((1, 2, 4, 4, 8, 8))
    number = random.choice(EDGES) if random.random() < 0.8 else random.getrandbits(64)
    data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _add(random: Random, data: bytearray, at: int, _: Sequence[bytes]) -> None:
    """A number there, a little more or less."""
    width = random.choice((1, 2, 4, 8))
    number = int.from_bytes(data[at : at + width], "little") + random.choice((-32, -8, -4, -1, 1, 4, 8, 32))
    data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _cut(random: Random, data: bytearray, at: int, _: Sequence[bytes]) -> None:
    del data[at : at + random.choice((1, 2, 4, 8, 32, len(data)))]


def _double(random: Random, data: bytearray, at: int, _: Sequence[bytes]) -> None:
    data[at:at] = data[at : at + random.choice((1, 2, 4, 8, 32, 256))] * random.choice((1, 1, 2, 20))


def _word(random: Random, data: bytearray, at: int, _: Sequence[bytes]) -> None:
    data[at:at] = random.choice(_WORDS)


def _splice(random: Random, data: bytearray, at: int, samples: Sequence[bytes]) -> None:
    other = random.choice(samples)
    if other:
        start = random.randrange(len(other))
        length = random.choice((1, 4, 16, 64, 4096))
        data[at : at + length] = other[start : start + length]


_BYTE_CHANGES = (_flip, _set, _number, _number, _add, _cut, _double, _word, _splice)


def change_tree(random: Random, tree: Any) -> Any:
    """A copy of JSON values with one to a few of them replaced, removed, renamed, doubled or moved."""
    tree = _copy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 5))):
        holders = _holders(tree)
        if holders:
            _change_one(random, random.choice(holders), holders)
    return tree


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def _holders(tree: Any) -> list[Any]:
    """Every table and list that is not empty, the outermost first."""
    found, waiting = [], [tree]
    while waiting and len(found) < 200:
        node = waiting.pop()
        if isinstance(node, (dict, list)) and node:
            found.append(node)
            waiting += node.values() if isinstance(node, dict) else node[:20]
    return found


def _change_one(random: Random, node: Any, holders: list[Any]) -> None:
    key = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
    change = random.randrange(8)
    if change < 4:
        node[key] = _copy(random.choice(VALUES))
    elif change == 4:
        del node[key]
    elif change == 5 and isinstance(node, dict):
        node[_near(random, key)] = node.pop(key) if random.random() < 0.5 else node[key]
    elif change == 6:
        other = random.choice(holders)
        if node[key] is not other and not isinstance(node[key], (dict, list)):
            chosen = random.choice(list(other)) if isinstance(other, dict) else random.randrange(len(other))
            node[key] = _copy(other[chosen])
    elif isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
        number = node[key]
        node[key] = random.choice(
            (-number, number * 2, number + 1, number - 1, float(number) if -1e300 < number < 1e300 else 0)
        )


def _near(random: Random, key: str) -> str:
    if not key or random.random() < 0.3:
        return random.choice(("", "x", "\x00", "\n", "__class__", "auto_map", "quantization_config", "x" * 3000))
    at = random.randrange(len(key))
    return key[:at] + random.choice(("", "_", "é", key[at] * 2)) + key[at + 1 :]


def as_json(random: Random, tree: Any) -> bytes:
    """The values as JSON text, now and then damaged as text too."""
    data = json.dumps(tree, ensure_ascii=random.random() < 0.7).encode("utf-8", "surrogatepass")
    return change_bytes(random, [data]) if random.random() < 0.2 else data
