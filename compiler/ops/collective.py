"""Rows of the op table for what devices share. Letters: M rows, C columns, U experts that a row uses.

Those of STAYING have no kernels: they stay calls of functions by these names, which whoever runs the module registers.
"""

from __future__ import annotations

from llmc.compiler.meaning import collective as meaning
from llmc.compiler.ops.op import Op

STAYING = ("all_reduce", "all_gather", "send", "recv")
_MPI = "https://www.mpi-forum.org/docs/mpi-4.1/mpi41-report.pdf"

ROWS = (
    Op(
        "all_reduce",
        ("x",),
        ("group",),
        lambda s, a: [(s[0], "float32")],
        meaning.all_reduce,
        "the sum of what each device of the group, a stage, gives: x (M, C) -> (M, C), added in order of ranks, number "
        "by number, so that a row's bits depend neither on other rows nor on the device",
        f"{_MPI} section 6.9.6",
    ),
    Op(
        "all_gather",
        ("x",),
        ("group", "width"),
        lambda s, a: [((s[0][0], int(a["width"])), "float32")],
        meaning.all_gather,
        "what each device of the group gives side by side in order of ranks: x (M, its columns) -> (M, C = width)",
        f"{_MPI} section 6.7",
    ),
    Op(
        "send",
        ("x",),
        ("to",),
        lambda s, a: [((1,), "int32")],
        meaning.send,
        "gives x (M, C) to the device of rank `to` -> (1,) int32, a zero: for its effect. x may be overwritten after "
        "it. -1 is nobody: a device whose stage sends by others takes part in making x all the same",
        f"{_MPI} section 3.2",
    ),
    Op(
        "recv",
        ("like",),
        ("source", "width"),
        lambda s, a: [((s[0][0], int(a["width"])), "float32")],
        meaning.recv,
        "what the device of rank `source` sends, in its order: (M, C = width), as many rows as `like` has",
        f"{_MPI} section 3.2",
    ),
    Op(
        "own_ids",
        ("ids",),
        ("first", "count"),
        lambda s, a: [(s[0], "int32")],
        meaning.own_ids,
        "ids (M,) or (M, U) less `first`, -1 where that is not within 0..count - 1: what a device has of a table, or "
        "of the experts",
        "numpy.where",
    ),
    Op(
        "take_columns",
        ("x",),
        ("first", "count"),
        lambda s, a: [((s[0][0], int(a["count"])), "float32")],
        meaning.take_columns,
        "columns first..first + count - 1 of x (M, C) -> (M, count)",
        "numpy.take",
    ),
)
