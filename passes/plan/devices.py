"""Devices as data: what each holds, reads and computes, and the links between them; docs/plan.md has the keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, PlainFormat
from llmc.compiler.placement import DEVICES, Placement, parse_placement
from llmc.passes.plan.tables import Table, read_table

KINDS = ("f32", "bf16", "int8")  # of numbers that are multiplied
KV = "kv"  # what stands for pages of keys and values among formats
GATHER, TREE = "gather", "tree"


@dataclass(frozen=True)
class Link:
    """Seconds until a message of no bytes is there, and bytes a second, each way.

    `wake_s` is added where who waits for it has waited long, as a stage does for the one before it.
    """

    latency_s: float
    bytes_per_s: float
    wake_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Of one message of `size` bytes."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class Device:
    """One device. `ops` are operations a second by kind of number; a multiplication and an addition are two.

    `streams`: bytes a second at which a format of weights, or pages ("kv"), is read where that is less than memory
    gives; `step_s` and `layer_s` are spent in every step, and in every layer of it, whatever is computed; `row_s` for
    each new token, by the device of the front. `exposed`: of the shorter of reading weights and multiplying, the part
    that the longer does not hide, 0 to 1. `unsteady`: the standard deviation of its time between two sums, as a part of
    it. `taken`: bytes of memory that are not for a model.
    """

    name: str
    node: int
    memory: float
    read: float
    ops: dict[str, float]
    streams: dict[str, float]
    step_s: float
    layer_s: float
    taken: float = 0.0
    row_s: float = 0.0
    exposed: float = 0.0
    unsteady: float = 0.0

    @property
    def kind(self) -> str:
        """cpu, cuda, or nothing for a number alone."""
        return self.name.partition(":")[0] if not self.name.isdigit() else ""

    def stream(self, format: str, share: float = 1.0) -> float:
        """Bytes a second of a format; `share` of what memory gives is left where others of its node read too."""
        return min(self.read * share, self.streams.get(format, math.inf))

    def rate(self, kind: str) -> float:
        """Operations a second of a kind; where that is not known, of the next wider one that is."""
        wider = KINDS[: KINDS.index(kind) + 1]
        return next((self.ops[each] for each in reversed(wider) if each in self.ops), max(self.ops.values()))

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for devices of which one is as good as the other."""
        return (
            self.kind, self.memory, self.read, *sorted(self.ops.items()), *sorted(self.streams.items()),
            self.step_s, self.layer_s, self.taken, self.row_s, self.exposed,
            self.unsteady,
        )  # fmt: skip


@dataclass(frozen=True)
class Node:
    """Devices of one machine. `together`: bytes a second that all of them read at most at once."""

    link: Link
    host_link: Link  # between devices of different kinds
    together: float
    all_reduce: str


@dataclass(frozen=True)
class Devices:
    """All devices in the order of the file; `between` is the link of a node to the others."""

    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    between: Link | None

    @cached_property
    def by_name(self) -> dict[str, Device]:
        """By what a device string calls them."""
        return {device.name: device for device in self.devices}

    def placement(self, text: str, split: str | None = None) -> Placement:
        """A device string's placement. Raises LlmcError naming devices that the file has none of."""
        placed = parse_placement(text, split)
        self.of(placed)
        return placed

    def of(self, placed: Placement) -> list[list[Device]]:
        """The devices of each stage."""
        unknown = [str(each) for stage in placed.stages for each in stage if str(each) not in self.by_name]
        if unknown:
            known = ", ".join(list(self.by_name)[:8]) + (", ..." if len(self.by_name) > 8 else "")
            raise LlmcError(f"no device {', '.join(unknown[:8])} in the devices file; it has {known}")
        return [[self.by_name[str(each)] for each in stage] for stage in placed.stages]

    def link(self, one: Device, other: Device) -> Link:
        """What a message between two devices takes."""
        if one.node == other.node:
            node = self.nodes[one.node]
            return node.link if one.kind == other.kind else node.host_link
        assert self.between is not None, "the file is refused without it"
        return self.between

    def share(self, active: Iterable[Device]) -> dict[int, float]:
        """Of each node, which part of its own rate a device reads at while these read at once."""
        wanted: dict[int, float] = {}
        for device in active:
            wanted[device.node] = wanted.get(device.node, 0.0) + device.read
        return {node: min(1.0, self.nodes[node].together / total) for node, total in wanted.items()}

    def only(self, names: Sequence[str]) -> Devices:
        """The same with some of the devices."""
        return Devices(tuple(self.by_name[name] for name in names), self.nodes, self.between)


def format_kind(format: str) -> str:
    """The kind of number that rows are multiplied with weights of a format in."""
    found = FORMATS[format]
    return found.name if isinstance(found, PlainFormat) else "int8"


def read_devices(text: str, where: str = "devices") -> Devices:
    """The devices of a TOML text. Raises LlmcError naming everything in it that is not understood."""
    table = read_table(text, where)
    nodes: list[Node] = []
    devices: list[Device] = []
    listed = table.tables("node", "machines with devices")
    counts: dict[str, int] = {}  # devices so far, by kind
    for each in listed:
        copies = each.count("count")
        groups = each.tables("device", "devices of this machine")
        node = _node(each, alone=len(groups) == 1 and groups[0].peek_count("count") == 1)
        each.end()
        made = [_device(group) for group in groups]
        for copy in range(copies):
            nodes.append(node)
            for device, count in made:
                devices += _named(device, count, len(nodes) - 1, counts, table if copy == 0 else None)
                if len(devices) > DEVICES:
                    raise LlmcError(f"{where}: more than {DEVICES} devices")
    between = None
    if "between" in table.values or len(nodes) > 1:
        inner = table.table("between", "the link between machines")
        between = _link(inner)
        inner.end()
    table.take("name", "")
    table.end()
    _check_names(devices, table)
    table.refuse()
    return Devices(tuple(devices), tuple(nodes), between)


def _link(table: Table, default: float | None = None) -> Link:
    micro = (table.number(key, 0.0) * 1e-6 for key in ("latency_us", "wake_us"))
    return Link(next(micro), table.number("gb_s", default) * 1e9, next(micro))


def _node(table: Table, alone: bool) -> Node:
    """`alone`: a machine of one device, which needs no link."""
    default = None if not alone else 1e6
    link = _link(table, default)
    host = Link(
        table.number("host_latency_us", link.latency_s * 1e6) * 1e-6,
        table.number("host_gb_s", link.bytes_per_s / 1e9) * 1e9,
        link.wake_s,
    )
    way = table.choice("all_reduce", (TREE, GATHER))
    return Node(link, host, table.number("together_gb_s", math.inf) * 1e9, way)


def _device(table: Table) -> tuple[Device, int]:
    name = table.name("name")
    count = table.count("count")
    ops = {kind: rate * 1e9 for kind, rate in table.numbers("gops", KINDS).items()}
    if not ops:
        table.fault("gops", "nothing", f"a rate for one of {', '.join(KINDS)} at least")
        ops = {"f32": 1e9}
    streams = {name: rate * 1e9 for name, rate in table.numbers("stream_gb_s", (*FORMATS, KV), needed=False).items()}
    found = Device(
        name, 0, table.number("memory_gb") * 1e9, table.number("read_gb_s") * 1e9, ops, streams,
        table.number("step_us", 0.0) * 1e-6, table.number("layer_us", 0.0) * 1e-6, table.number("taken_gb", 0.0) * 1e9,
        table.number("row_us", 0.0) * 1e-6, table.number("exposed", 0.0), table.number("unsteady", 0.0),
    )  # fmt: skip
    if found.exposed > 1:
        table.fault("exposed", str(found.exposed), "a part, 0 to 1")
    table.end()
    return found, count


def _named(device: Device, count: int, node: int, counts: dict[str, int], table: Table | None) -> list[Device]:
    """A device for each; numbers of a kind go on from node to node. `table` is told of one that does not fit."""
    number = device.name if device.name.isdigit() else device.name.partition(":")[2]
    kind = device.kind
    first = counts.setdefault(kind, int(number or 0))
    if table is not None and number and int(number) != first:
        wanted = f"{kind}:{first}" if kind else str(first)
        table.faults.append(f"a device is named {device.name!r}, but the next of its kind is {wanted}")
    counts[kind] = first + count
    return [
        replace(device, name=f"{kind}:{each}" if kind else str(each), node=node) for each in range(first, first + count)
    ]


def _check_names(devices: list[Device], table: Table) -> None:
    kinds = {device.kind for device in devices}
    if "" in kinds and len(kinds) > 1:
        table.faults.append("devices that are numbers alone beside named ones; name all of them, as cuda:0")
