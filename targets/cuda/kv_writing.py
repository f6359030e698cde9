"""The launch that writes K and V of a step's rows into their pages, before rows attend; and turns queries for those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.attention_block import EIGHT, THREADS
from llmc.targets.cuda.kv_kind import Pages, Token
from llmc.targets.cuda.kv_rows import KvRows, turns_by_halves
from llmc.targets.cuda.kv_words import KvWords, turns_by_fours
from llmc.targets.cuda.launch import by_rows, launch, strided
from llmc.targets.cuda.rope import Turn
from llmc.targets.cuda.sight import Places
from llmc.targets.cuda.staged_chunk import TURNS

FEW_ROWS = 64  # of a step that gives each row blocks of its own
MOST_STAGED = 128  # elements of a head: of more, a warp's sums do not fit in registers


def is_staged(pages: Pages, size: int) -> bool:
    """Whether K and V of heads of so many elements go through shared memory, as they lie in pages."""
    return pages.operands and size % (TURNS * EIGHT) == 0 and size <= MOST_STAGED


def write_rows(pages: Pages, rows: Any, kv: Any, places: Places, sizes: tuple[int, int, int]) -> None:
    """A launch that writes K and V of all rows (M, (H + 2G) D)."""
    if pages.operands and turns_by_fours(sizes[2], 0):
        _write_words(None, rows, kv, places, sizes, None, "")
        return
    grid = {"blockIdx.x": rows.shape[0], "blockIdx.y": sizes[1], "threadIdx.x": THREADS}
    with launch(grid) as (row, group, thread):
        _write(pages, lambda column: rows[row, column], kv, places, row, sizes, group, thread)


def _write_words(
    q: Any, rows: Any, kv: Any, places: Places, sizes: tuple[int, int, int], table: Any, layout: str
) -> None:
    """K and V, and queries where there is a buffer for them, by the launch for so many rows."""
    few, many = (kind(rows, kv, places, sizes, table, layout) for kind in (KvWords, KvRows))
    if turns_by_halves(sizes[2]):
        by_rows(rows.shape[0], [(FEW_ROWS, lambda: few.emit(q))], lambda: many.emit(q))
    else:
        few.emit(q)


def write_turned(
    pages: Pages, qkv: Any, table: Any, kv: Any, places: Places, sizes: tuple[int, int, int], layout: str
) -> Any:
    """A launch that writes K, turned by table (M, R), and V of all rows; and queries (M, H D), turned, for the next.

    Where pages hold pairs of bfloat16 queries are pairs too, if the launch for these can write them.
    """
    heads, groups, size = sizes
    if is_staged(pages, size) and turns_by_fours(size, int(table.shape[1])):
        q = T.alloc_buffer((qkv.shape[0], heads * size // 2), "uint32")
        _write_words(q, qkv, kv, places, sizes, table, layout)
        return q
    turn, own = Turn(size, heads + groups, 0, layout), heads // groups * size
    q = T.alloc_buffer((qkv.shape[0], heads * size), "float32")
    grid = {"blockIdx.x": qkv.shape[0], "blockIdx.y": groups, "threadIdx.x": THREADS}
    with launch(grid) as (row, group, thread):

        def number(column: Any) -> Any:
            return turn.of(qkv, table, row, column)

        def one(i: Any) -> None:
            T.buffer_store(q, number(group * own + i), [row, group * own + i])

        strided(own, thread, THREADS, one)
        _write(pages, number, kv, places, row, sizes, group, thread)
    return q


def _write(
    pages: Pages, number: Callable[[Any], Any], kv: Any, places: Places, row: Any, sizes: tuple[int, int, int],
    group: Any, thread: Any,
) -> None:  # fmt: skip
    """K and V of one kv head of a row into its page, by all threads of the block; sizes are H, G and D.

    number: of a column of the row's (H + 2G) D.
    """
    heads, groups, size = sizes
    slot = places.slots[row]
    page = places.page(places.seqs[row], slot)

    def side(which: int) -> Callable[[Any], Any]:
        return lambda d: number((heads + which * groups + group) * size + d)

    pages.write(Token(kv, page, group, T.floormod(slot, PAGE), size), side(0), side(1), thread, THREADS)
