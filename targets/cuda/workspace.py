"""Memory that a kernel's launches leave each other: its own until it is lowered, then an operand after its outputs.

So the memory manager of the step gives it out, as it does all other tensors, and keeps it: what a captured step has
noted down stays. TVM's own workspaces are freed when a greater one is asked for.
"""

from __future__ import annotations

from tvm import tirx


def with_workspaces(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same function, what is allocated outside of its launches as its last parameters."""
    if not isinstance(function.body, tirx.SeqStmt):
        return function
    allocated = [stmt for stmt in function.body.seq if isinstance(stmt, tirx.AllocBuffer)]
    if not allocated:
        return function
    rest = [stmt for stmt in function.body.seq if not isinstance(stmt, tirx.AllocBuffer)]
    params = [*function.params, *(stmt.buffer for stmt in allocated)]
    return tirx.PrimFunc(params, rest[0] if len(rest) == 1 else tirx.SeqStmt(rest), attrs=function.attrs)
