"""Block formats in memory: tiles of 16 rows, as int32 words, every record a multiple of 64 bytes.

A tile is [head][record][record]... The head holds, for the "row" kind of scales only, 16 float32 row scales and then
the sub-scales as [block][row] bytes, padded to 64 bytes. A record is [codes][tables], padded to 64 bytes.

Codes stand in units of 8 groups; a group is 4 codes of each of 16 rows, 64 bytes when a code is a byte: one vector
register, one u8 x s8 dot of four columns for 16 rows. A plane of b bits of a unit is b registers. For b = 1, 2, 4 and 8
register r holds group r + j * b in its bits j * b and up. For b = 6 and 7 register r holds group r in its low b bits;
the 8 - b bits above are a piece of a later group: b / (8 - b) registers hold one such group, its lowest bits first.

Tables of a record: "f16": scales as [block][row] float16, then minima or zeros likewise. "super": sub_scale as
[block][row] bytes, sub_minimum likewise (with 4-bit subs one byte has both, the scale low), 16 scales as float16,
16 minima likewise.
"""

from __future__ import annotations

import numpy as np

from llmc.compiler.formats.block import U8, BlockFormat, Quantized
from llmc.compiler.formats.plain import TILE, Array, ceil_to, pieces, tiles, tiles_of

GROUPS = 8  # of a unit
SPREAD = {6: 3, 7: 7}  # bits of a plane -> registers that hold a group beyond the first ones


def places(bits: int) -> list[list[tuple[int, int, int]]]:
    """For each group, where a plane of `bits` keeps it: (register, first bit there, how many bits), low bits first.

    >>> places(4)[5]
    [(1, 4, 4)]
    >>> places(6)[7]
    [(3, 6, 2), (4, 6, 2), (5, 6, 2)]
    """
    if bits not in SPREAD:
        return [[(group % bits, group // bits * bits, bits)] for group in range(GROUPS)]
    spread, above = SPREAD[bits], 8 - bits
    own = [[(group, 0, bits)] for group in range(bits)]
    return own + [[(extra * spread + i, bits, above) for i in range(spread)] for extra in range(GROUPS - bits)]


def encode(format: BlockFormat, quantized: Quantized, rows: int, columns: int) -> Array:
    """codes and tables of (N, K) -> the packed tensor (T, words) int32."""
    out = np.empty(format.packed_shape(rows, columns), np.int32)
    for piece in pieces(rows, columns):
        tables = {name: table[piece] for name, table in quantized.tables.items()}
        part = Quantized(quantized.codes[piece], tables)
        out[tiles_of(piece)] = _encode(format, part, piece.stop - piece.start, columns)
    return out


def _encode(format: BlockFormat, quantized: Quantized, rows: int, columns: int) -> Array:
    width = ceil_to(columns, format.columns)
    per_column = 2 if format.pair else 1
    codes = _fill(quantized.codes, rows, width // per_column)
    records = width // format.columns
    parts = [_planes(format, codes).reshape(tiles(rows), records, -1)]
    if format.scale != "row":
        parts += _record_tables(format, quantized, rows, width)
    used = sum(part.shape[2] for part in parts)
    parts.append(np.zeros((tiles(rows), records, format.record_words * 4 - used), np.uint8))
    body = np.concatenate(parts, axis=2).reshape(tiles(rows), -1)
    if format.scale == "row":
        body = np.concatenate([_head(format, quantized, rows, width), body], axis=1)
    return np.ascontiguousarray(body).view(np.int32)


def decode(format: BlockFormat, packed: Array, rows: int, columns: int) -> Quantized:
    """The inverse of `encode`, columns padded to whole records."""
    width = ceil_to(columns, format.columns)
    raw = np.ascontiguousarray(packed).view(np.uint8)
    head = 4 * format.head_words(columns)
    records = raw[:, head:].reshape(raw.shape[0], -1, 4 * format.record_words)
    codes = _codes(format, records[:, :, : 4 * format.code_words])[:rows]
    if format.scale == "row":
        row_scale = np.ascontiguousarray(raw[:, : 4 * TILE]).view(np.float32).reshape(-1)
        subs = raw[:, 4 * TILE : 4 * TILE + width // format.block * TILE]
        sub_scale = _from_tiles(subs.reshape(raw.shape[0], -1, TILE)).view(np.int8)
        return Quantized(codes, {"row_scale": row_scale[:rows], "sub_scale": sub_scale[:rows]})
    tables = _read_tables(format, records[:, :, 4 * format.code_words :])
    return Quantized(codes, {name: table[:rows] for name, table in tables.items()})


def _fill(table: Array, rows: int, columns: int) -> Array:
    """Zeros added: (n, k) -> (T * 16, columns)."""
    out = np.zeros((tiles(rows) * TILE, columns), table.dtype)
    out[: table.shape[0], : table.shape[1]] = table
    return out


def _planes(format: BlockFormat, codes: Array) -> U8:
    """(T * 16, codes) -> (T, units, bytes of a unit)."""
    words = codes.view(np.uint32)  # the four codes of a row in a group: what is done to one byte is done to all four
    grouped = words.reshape(-1, TILE, words.shape[1] // GROUPS, GROUPS).transpose(0, 2, 3, 1)
    parts, shift = [], 0
    for bits in format.planes:
        plane = np.zeros((*grouped.shape[:2], bits, TILE), np.uint32)
        for group, held in enumerate(places(bits)):
            low = shift
            for register, at, count in held:
                mask = np.uint32(0x01010101 * ((1 << count) - 1))
                plane[:, :, register] |= ((grouped[:, :, group] >> np.uint32(low)) & mask) << np.uint32(at)
                low += count
        parts.append(plane.reshape(*plane.shape[:2], -1).view(np.uint8))
        shift += bits
    return np.concatenate(parts, axis=2)


def _codes(format: BlockFormat, raw: U8) -> U8:
    """The inverse of `_planes`: (T, records, bytes) -> (T * 16, codes)."""
    units = raw.reshape(raw.shape[0], -1, sum(format.planes) * 4 * TILE)
    out = np.zeros((*units.shape[:2], GROUPS, TILE, 4), np.uint8)
    shift, start = 0, 0
    for bits in format.planes:
        plane = units[:, :, start : start + bits * 4 * TILE].reshape(*units.shape[:2], bits, TILE, 4)
        for group, held in enumerate(places(bits)):
            low = shift
            for register, at, count in held:
                piece = (plane[:, :, register] >> np.uint8(at)) & np.uint8((1 << count) - 1)
                out[:, :, group] |= piece << np.uint8(low)
                low += count
        shift, start = shift + bits, start + bits * 4 * TILE
    return out.transpose(0, 3, 1, 2, 4).reshape(raw.shape[0] * TILE, -1)


def _by_block(table: Array, rows: int, blocks: int, per_record: int) -> U8:
    """(N, blocks) -> (T, records, bytes) ordered [block][row]."""
    whole = _fill(table, rows, blocks).reshape(-1, TILE, blocks).transpose(0, 2, 1)
    flat = np.ascontiguousarray(whole).view(np.uint8)
    return flat.reshape(flat.shape[0], blocks // per_record, -1)


def _from_tiles(table: Array) -> Array:
    """(T, blocks, 16) -> (T * 16, blocks)."""
    return np.ascontiguousarray(table.transpose(0, 2, 1)).reshape(-1, table.shape[1])


def _head(format: BlockFormat, quantized: Quantized, rows: int, width: int) -> U8:
    """(T, head bytes): row scales, then sub-scales."""
    row_scale = _fill(quantized.tables["row_scale"].astype(np.float32)[:, None], rows, 1)
    blocks = width // format.block
    subs = _by_block(quantized.tables["sub_scale"], rows, blocks, blocks)[:, 0]
    gap = np.zeros((subs.shape[0], 4 * format.head_words(width) - 4 * TILE - subs.shape[1]), np.uint8)
    return np.concatenate([row_scale.reshape(-1, TILE).view(np.uint8), subs, gap], axis=1)


def _record_tables(format: BlockFormat, quantized: Quantized, rows: int, width: int) -> list[U8]:
    """Each (T, records, bytes), in the order of a record."""
    blocks, per_record = width // format.block, format.columns // format.block
    tables = dict(quantized.tables)
    if format.sub_bits == 4:
        low, high = tables["sub_scale"].astype(np.uint8), tables.pop("sub_minimum").astype(np.uint8)
        tables["sub_scale"] = (low | (high << np.uint8(4))).astype(np.uint8)
    supers = format.scale == "super"
    order = ["sub_scale", "sub_minimum", "scale", "minimum"] if supers else ["scale", "minimum", "zero"]
    parts = []
    for name in order:
        if name in tables:
            whole = supers and not name.startswith("sub")  # one a record, not one a block
            count = width // format.columns if whole else blocks
            parts.append(_by_block(tables[name], rows, count, 1 if whole else per_record))
    return parts


def _read_tables(format: BlockFormat, raw: U8) -> dict[str, Array]:
    """(T, records, bytes) -> tables of (T * 16, ...)."""
    per_record = format.columns // format.block
    at = 0

    def take(count: int, dtype: str) -> Array:
        nonlocal at
        size = count * TILE * np.dtype(dtype).itemsize
        part = np.ascontiguousarray(raw[:, :, at : at + size]).view(dtype)
        at += size
        return _from_tiles(part.reshape(raw.shape[0], -1, TILE))

    if format.scale == "f16":
        tables = {"scale": take(per_record, "float16")}
        if isinstance(format.offset, str):
            tables[format.offset] = take(per_record, "float16")
        return tables
    tables = {"sub_scale": take(per_record, "int8")}
    if format.sub_bits == 4:
        both = tables["sub_scale"].view(np.uint8)
        tables = {"sub_scale": (both & np.uint8(15)).view(np.int8), "sub_minimum": both >> np.uint8(4)}
    elif format.offset == "minimum":
        tables["sub_minimum"] = take(per_record, "uint8")
    tables["scale"] = take(1, "float16")
    if format.offset == "minimum":
        tables["minimum"] = take(1, "float16")
    return tables
