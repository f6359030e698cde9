"""KV page kinds: what the pages of a layer hold, in NumPy. Kernels write and read the same bytes (targets/kv_*.py).

A layer's pages are one tensor (pages, 2, G, 16 D) of numbers, or (pages, 1, G, bytes) of codes and their scales: what
a page has of a kv head is K, then V. Letters: G kv heads, D head size, W = D rounded up to 16. A page has 16 tokens.

  f32        K (D, 16), V (16, D) float32
  bf16       K (E/2, 16, 2), V (8, D, 2) bfloat16 bits in uint16, E = D rounded up to 2: two elements of a token lie
             together in K, an element of two tokens in V, as products of pairs take them (targets/attention/kv_bf16.py)
  q8         K: scale (16,) bf16; codes (D, 16) int8, up to 16 W bytes
             V: scale (16,) bf16; codes (16, W) int8
  q4         K: scale (16,) bf16; six-bit codes (W/4, 3, 16): for a token and four elements, byte j < 2 has the low
             four bits of elements 2j and 2j + 1 (low half first), byte 2 the upper two bits of element e from bit 2e on
             V: scale (groups, 16) bf16, minimum (groups, 16) bf16, where a group is 32 elements, the last one what is
             left; then four-bit codes (16, W/2): byte i of a group has elements i (low half) and 16 + i; a last group
             of at most 16 elements takes 8 bytes, of elements i and 8 + i

A token is written once and never rescaled, so each has scales of its own. A number is scale * code in q8,
scale * (code - 31.5) in K of q4 and minimum + scale * code in V of q4, both of which are rotated (see `rotate`): that
spreads the few large elements of a token over all of them (https://arxiv.org/abs/2404.00456). An error of K passes
through the exponential of softmax, so K has two bits more than V; tests/bench/kv_quality.py measures what that gives.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.formats import ceil_to, from_bf16, to_bf16
from llmc.compiler.hadamard import hadamard

PAGE = 16  # tokens a page holds
GROUP = 32  # elements of a q4 value that share a scale and a minimum
TABLE = 2 * PAGE  # bytes of a bfloat16 number for each token
SMALLEST_SCALE = 2.0**-126  # a smaller one has no float32 inverse; its codes stand for zero

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
U8 = NDArray[np.uint8]


class Kind(Protocol):
    """How K and V lie in pages (n, *page_shape)."""

    dtype: np.dtype[Any]  # of the pages

    def page_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """The shape of one page of one layer."""
        ...

    def store(self, pages: NDArray[Any], page: int, place: int, k: F32, v: F32) -> None:
        """Write k, v (G, D) of one token to place 0..15 of a page."""
        ...

    def load(self, pages: NDArray[Any], head_dim: int) -> tuple[F32, F32]:
        """K (n, G, D, 16) and V (n, G, 16, D) of all pages."""
        ...

    def keys(self, pages: NDArray[Any], head_dim: int) -> NDArray[Any]:
        """What pages hold of K, as it is there: a view (n, G, elements)."""
        ...

    def queries(self, q: F32) -> F32:
        """Queries as they are multiplied with K."""
        ...


class _F32:
    dtype = np.dtype(np.float32)

    def page_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        return 2, kv_heads, PAGE * head_dim

    def store(self, pages: NDArray[Any], page: int, place: int, k: F32, v: F32) -> None:
        pages[page, 0].reshape(*k.shape, PAGE)[:, :, place] = k
        pages[page, 1].reshape(len(v), PAGE, -1)[:, place] = v

    def load(self, pages: NDArray[Any], head_dim: int) -> tuple[F32, F32]:
        count, _, heads, _ = pages.shape
        k = pages[:, 0].reshape(count, heads, head_dim, PAGE)
        return k, pages[:, 1].reshape(count, heads, PAGE, head_dim)

    def keys(self, pages: NDArray[Any], head_dim: int) -> NDArray[Any]:
        return pages[:, 0]

    def queries(self, q: F32) -> F32:
        return q


class _Bf16:
    dtype = np.dtype(np.uint16)

    def page_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        return 2, kv_heads, PAGE * ceil_to(head_dim, 2)

    def store(self, pages: NDArray[Any], page: int, place: int, k: F32, v: F32) -> None:
        keys, values = self._views(pages[page][None], k.shape[1])
        keys[0, :, :, place] = to_bf16(padded(k, 2)).reshape(len(k), -1, 2)
        values[0, :, place // 2, :, place % 2] = to_bf16(v)

    def load(self, pages: NDArray[Any], head_dim: int) -> tuple[F32, F32]:
        keys, values = self._views(pages, head_dim)
        k = keys.swapaxes(3, 4).reshape(*keys.shape[:2], -1, PAGE)[:, :, :head_dim]
        return from_bf16(k), from_bf16(values.swapaxes(3, 4).reshape(*values.shape[:2], PAGE, head_dim))

    def keys(self, pages: NDArray[Any], head_dim: int) -> NDArray[Any]:
        return pages[:, 0]

    def queries(self, q: F32) -> F32:
        return from_bf16(to_bf16(q))

    def _views(self, pages: NDArray[Any], size: int) -> tuple[U16, U16]:
        """K (n, G, E/2, 16, 2) and V (n, G, 8, D, 2)."""
        count, _, heads, _ = pages.shape
        values = pages[:, 1, :, : PAGE * size]
        return pages[:, 0].reshape(count, heads, -1, PAGE, 2), values.reshape(count, heads, PAGE // 2, size, 2)


class _Q8:
    dtype = np.dtype(np.uint8)

    def page_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        return 1, kv_heads, 2 * q8_key_bytes(head_dim)

    def store(self, pages: NDArray[Any], page: int, place: int, k: F32, v: F32) -> None:
        v = padded(v, PAGE)
        for side, x, (table, codes) in zip((0, 1), (k, v), self._views(pages[page][None], k.shape[1]), strict=True):
            scale, inverse = bf16_scale(np.abs(x).max(-1), 1 / 127)
            table[0, :, 0, place] = scale
            one = np.rint(np.clip(x * inverse[:, None], -127, 127)).astype(np.int8).view(np.uint8)
            (codes[0, :, place] if side else codes[0, :, :, place])[...] = one

    def load(self, pages: NDArray[Any], head_dim: int) -> tuple[F32, F32]:
        (k_scale, k), (v_scale, v) = self._views(pages, head_dim)
        values = v.view(np.int8)[..., :head_dim] * from_bf16(v_scale).swapaxes(2, 3)
        return k.view(np.int8) * from_bf16(k_scale), values

    def keys(self, pages: NDArray[Any], head_dim: int) -> NDArray[Any]:
        return pages[:, 0, :, : q8_key_bytes(head_dim)]

    def queries(self, q: F32) -> F32:
        return q

    def _views(self, pages: NDArray[Any], size: int) -> tuple[tuple[U16, U8], tuple[U16, U8]]:
        """(scales (n, G, 1, 16), codes) of K (n, G, D, 16) and of V (n, G, 16, W)."""
        width = ceil_to(size, PAGE)
        end = q8_key_bytes(size)
        return _split(pages[:, 0], 1, (size, PAGE)), _split(pages[:, 0, :, end:], 1, (PAGE, width))


class _Q4:
    dtype = np.dtype(np.uint8)

    def page_shape(self, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        values = 2 * TABLE * len(_halves(head_dim)) + PAGE * ceil_to(head_dim, PAGE) // 2
        return 1, kv_heads, q4_key_bytes(head_dim) + values

    def store(self, pages: NDArray[Any], page: int, place: int, k: F32, v: F32) -> None:
        (k_scale, k_codes), (v_tables, v_codes) = self._views(pages[page][None], k.shape[1])
        x = padded(rotate(k), PAGE)
        scale, inverse = bf16_scale(np.abs(x).max(-1), 1 / 31.5)
        k_scale[0, :, 0, place] = scale
        half = np.float32(31.5)
        six = np.rint(np.clip(x * inverse[:, None], -half, half) + half).astype(np.uint8).reshape(len(k), -1, 4)
        low, top = six & 15, six >> 4 << np.arange(0, 8, 2, dtype=np.uint8)
        k_codes[0, :, :, :2, place] = low[..., 0::2] | low[..., 1::2] << 4
        k_codes[0, :, :, 2, place] = np.bitwise_or.reduce(top, axis=-1)
        v_tables[0, :, :, place], v_codes[0, :, place] = self._encode_values(rotate(v))

    def load(self, pages: NDArray[Any], head_dim: int) -> tuple[F32, F32]:
        (k_scale, k_codes), (v_tables, v_codes) = self._views(pages, head_dim)
        low = np.stack([k_codes[:, :, :, :2] & 15, k_codes[:, :, :, :2] >> 4], axis=4)
        top = k_codes[:, :, :, 2, None] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
        six = low.reshape(top.shape) + 16 * top
        x = (six.reshape(*k_codes.shape[:2], -1, PAGE) - np.float32(31.5)) * from_bf16(k_scale)
        k = rotate(x[:, :, :head_dim].swapaxes(2, 3)).swapaxes(2, 3)
        scale, minimum = np.split(from_bf16(v_tables).swapaxes(2, 3), 2, axis=3)  # (n, G, 16, groups)
        parts = []
        for group, (start, half) in enumerate(_halves(head_dim)):
            codes = v_codes[..., start // 2 : start // 2 + half]
            both = np.concatenate([codes & 15, codes >> 4], axis=-1)
            parts.append(both * scale[..., group, None] + minimum[..., group, None])
        return k, rotate(np.concatenate(parts, axis=-1)[..., :head_dim])

    def keys(self, pages: NDArray[Any], head_dim: int) -> NDArray[Any]:
        return pages[:, 0, :, : q4_key_bytes(head_dim)]

    def queries(self, q: F32) -> F32:
        return q

    @staticmethod
    def _encode_values(v: F32) -> tuple[U16, U8]:
        """v (G, D) -> scales then minimums (G, 2 groups), codes (G, W / 2)."""
        x = padded(v, PAGE, "edge")  # repeating the last element changes no minimum
        scales, minimums, codes = [], [], []
        for start, half in _halves(v.shape[1]):
            group = x[:, start : start + 2 * half]
            minimum = to_bf16(group.min(-1))
            low = from_bf16(minimum)[:, None]
            scale, inverse = bf16_scale(group.max(-1) - low[:, 0], 1 / 15)
            four = np.rint(np.clip((group - low) * inverse[:, None], 0, 15)).astype(np.uint8)
            codes.append(four[:, :half] | four[:, half:] << 4)
            scales.append(scale)
            minimums.append(minimum)
        return np.stack([*scales, *minimums], axis=1), np.concatenate(codes, axis=1)

    def _views(self, pages: NDArray[Any], size: int) -> tuple[tuple[U16, U8], tuple[U16, U8]]:
        """K: scales (n, G, 1, 16), codes (n, G, W/4, 3, 16). V: tables (n, G, 2 groups, 16), codes (n, G, 16, W/2)."""
        width = ceil_to(size, PAGE)
        tables = 2 * len(_halves(size))
        values = pages[:, 0, :, q4_key_bytes(size) :]
        return _split(pages[:, 0], 1, (width // 4, 3, PAGE)), _split(values, tables, (PAGE, width // 2))


def q8_key_bytes(head_dim: int) -> int:
    """Bytes of K, and as many of V, of one kv head in a q8 page."""
    return TABLE + PAGE * ceil_to(head_dim, PAGE)


def q4_key_bytes(head_dim: int) -> int:
    """Bytes of K of one kv head in a q4 page."""
    return TABLE + PAGE * ceil_to(head_dim, PAGE) * 3 // 4


def _halves(size: int) -> list[tuple[int, int]]:
    """(first element, elements in low halves) of each group of a q4 value.

    >>> _halves(80)
    [(0, 16), (32, 16), (64, 8)]
    """
    return [(start, 8 if size - start <= PAGE else 16) for start in range(0, size, GROUP)]


def _split(pieces: U8, tables: int, shape: tuple[int, ...]) -> tuple[U16, U8]:
    """Views of bytes (n, G, bytes): tables (n, G, tables, 16) of bfloat16 bits, and the codes after them."""
    end, count = TABLE * tables, int(np.prod(shape))
    table = pieces[..., :end].view(np.uint16).reshape(*pieces.shape[:2], tables, PAGE)
    return table, pieces[..., end : end + count].reshape(*pieces.shape[:2], *shape)


def padded(x: F32, multiple: int, mode: Any = "constant") -> F32:
    """x (G, D) with D rounded up to a multiple, by zeros or ("edge") by the last element."""
    return np.pad(x, [(0, 0), (0, -x.shape[1] % multiple)], mode=mode)


def bf16_scale(span: F32, factor: float) -> tuple[U16, F32]:
    """(bits of span * factor as bfloat16, the inverse of what the bits mean, or 0 where it has none)."""
    bits = to_bf16(span * np.float32(factor))
    scale = from_bf16(bits)
    usable = scale >= np.float32(SMALLEST_SCALE)
    return bits, np.where(usable, np.float32(1) / np.where(usable, scale, np.float32(1)), np.float32(0))


def rotate(x: F32) -> F32:
    """x (..., D) times a Hadamard matrix over sqrt(n), in blocks of n, the greatest power of 2 that divides D.

    It keeps q . k when both are rotated, and is its own inverse.
    """
    return hadamard(x, rotated_block(x.shape[-1]))


def rotated_block(head_dim: int) -> int:
    """The greatest power of 2 that divides the head size.

    >>> [rotated_block(size) for size in (64, 80, 10)]
    [64, 16, 2]
    """
    return head_dim & -head_dim


KINDS: dict[str, Kind] = {
    "f32": _F32(),
    "bf16": _Bf16(),
    "q8": _Q8(),
    "q4": _Q4(),
}


def page_shape(kind: str, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """The shape of one page of one layer."""
    return KINDS[kind].page_shape(kv_heads, head_dim)
