"""How each value of a function can lie on devices that share it: by columns, as a sum, by experts, or only whole."""

from __future__ import annotations

from enum import Enum
from typing import Any

from tvm import relax

from llmc.compiler import ops
from llmc.passes.partition.device import Member
from llmc.passes.partition.reading import ATTENDING, Reading
from llmc.passes.partition.shares import Ranges

# Ops whose number i depends on number i of their first operand alone, however many of these there are.
BY_COLUMN = ("activate", "xielu", "clip", "scale", "soft_cap")
# Ops on rows of heads: as those of them, if they are told how many heads there are.
BY_HEAD = ("rope", "grow_queries", "qk_norm")
GATED = ("gated", "bounded_gated")
# Ops that a device has no part of, and those that are there for their effect.
WHOLE = ("rms_norm", "layer_norm", "route", "store_kv", "store_keys", "copy_pages")


class Kind(Enum):
    """What is not by columns that the op itself has chosen."""

    WHOLE = 0  # nothing but whole
    ANY = 1  # whatever columns somebody wants
    EXPERTS = 2  # slices of the experts that a row uses, of which a device fills its own


Natural = Kind | Ranges


class Nature:
    """The natures of one function's values for one member of a group."""

    def __init__(self, reading: Reading, member: Member) -> None:
        self.reading, self.member, self.cut = reading, member, member.cut
        self._natural: dict[Any, Natural] = {}
        self._sums: dict[Any, bool] = {}
        self.gathered = self._gathered()

    def _gathered(self) -> set[Any]:
        """What is cut although somebody wants it whole: matrices that are too large for every device to have.

        The head, whose logits are gathered, and those in front of a norm of all queries as one row.
        """
        found: set[Any] = set()
        for value in self.reading.bound.values():
            match = ops.match(value)
            if match and match[0].name == "top":
                found.add(match[1][0])
            if match and match[0].name == "qk_norm" and match[2]["span"] == "all":
                found.update(self._beside(match[1][0]))
        return found

    def of(self, variable: Any) -> Natural:
        """How a value lies without being made whole first."""
        if self.cut.alone or variable in self.reading.made:
            return Kind.WHOLE
        if variable not in self._natural:
            self._natural[variable] = self._of(self.reading.bound.get(variable))
        return self._natural[variable]

    def _of(self, value: Any) -> Natural:
        found = ops.match(value)
        if found is None:
            return self._of_plain(value)
        op, tensors, attrs = found
        if op.name == "linear":
            return Kind.ANY
        if op.name in BY_COLUMN:
            return self.of(tensors[0])
        if op.name in BY_HEAD:
            return self.of(tensors[0]) if attrs.get("span") != "all" else Kind.WHOLE
        if op.name in (*ATTENDING, "cross_attention"):
            own = self.cut.heads(int(attrs["heads"]), int(attrs["kv_heads"]))
            return own.queries(int(attrs["head_dim"]))
        if op.name == "load_keys":
            layer = self.reading.layer(tensors[0])
            return Kind.WHOLE if layer is None else self.member.heads_of(layer).keys(int(attrs["head_dim"]))
        if op.name == "head_linear":
            return self._of_head_linear(tensors, int(attrs["heads"]))
        if op.name in GATED:
            return self._of_halves(tensors[0])
        if op.name == "gate_rows":
            mixed = self.of(tensors[0])
            return mixed if isinstance(mixed, tuple) and self.of(tensors[1]) is Kind.ANY else Kind.WHOLE
        return Kind.EXPERTS if op.name in ("experts_in", "experts_bias") else Kind.WHOLE

    def _of_plain(self, value: Any) -> Natural:
        if not isinstance(value, relax.Call):
            return Kind.WHOLE
        if value.op.name == "relax.add":
            return self.of(value.args[0]) if value.args[1].ty.ndim == 1 else Kind.WHOLE
        kinds = {self.of(part) for part in value.args[0].fields}
        return kinds.pop() if kinds in ({Kind.ANY}, {Kind.EXPERTS}) else Kind.WHOLE

    def _of_halves(self, gate_up: Any) -> Natural:
        """Of the product of two halves: as the half that has chosen its columns."""
        halves = self.halves(gate_up)
        kinds = {self.of(half) for half in halves} if halves else {self.of(gate_up)}
        chosen = {kind for kind in kinds if isinstance(kind, tuple)}
        if len(chosen) == 1 and kinds <= chosen | {Kind.ANY}:
            return chosen.pop() if halves else Kind.WHOLE
        return kinds.pop() if len(kinds) == 1 and not chosen else Kind.WHOLE

    def halves(self, gate_up: Any) -> list[Any]:
        """The two values that stand side by side in one, nothing where it is made otherwise."""
        fields = self._beside(gate_up)
        even = len(fields) == 2 and int(fields[0].ty.shape[1]) == int(fields[1].ty.shape[1])
        return fields if even else []

    def _beside(self, variable: Any) -> list[Any]:
        """The values that stand side by side in one."""
        value = self.reading.bound.get(variable)
        return list(value.args[0].fields) if isinstance(value, relax.Call) and value.op.name == "relax.concat" else []

    def _of_head_linear(self, tensors: list[Any], heads: int) -> Natural:
        x, weight = tensors
        kind = self.of(x)
        if not isinstance(kind, tuple):
            return kind if kind is Kind.ANY else Kind.WHOLE
        size, rows = int(x.ty.shape[1]) // heads, int(weight.ty.shape[0]) // heads
        return tuple((first // size * rows, end // size * rows) for first, end in kind)

    def sums(self, variable: Any) -> bool:
        """Whether what the devices have of it is to be added up."""
        if self.cut.alone or variable in self.reading.made or variable in self.gathered:
            return False
        if variable not in self._sums:
            self._sums[variable] = self._sum(variable)
        return self._sums[variable]

    def _sum(self, variable: Any) -> bool:
        value = self.reading.bound.get(variable)
        found = ops.match(value)
        if found is None:
            # A sum is worth it only where no part of it is made whole for others.
            return (
                isinstance(value, relax.Call)
                and value.op.name == "relax.add"
                and value.args[1].ty.ndim == 2
                and all(self.sums(part) and self.reading.uses[part] == 1 for part in value.args)
            )
        op, tensors, _ = found
        if op.name == "linear":
            return isinstance(kind := self.of(tensors[0]), tuple) or kind is Kind.ANY
        if op.name in ("scale", "take_rows", "gate_rows", "experts_out_bias"):
            return self.sums(tensors[0]) and self.reading.uses[tensors[0]] == 1
        return op.name in ("embedding", "experts_out")

    def needed_whole(self, variable: Any) -> bool:
        """Whether a value is wanted whole, whoever reads it; not all that are wanted whole."""
        return self.reading.name(variable) in WHOLE and variable not in self.reading.made
