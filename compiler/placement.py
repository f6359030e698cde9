"""Where a model runs: a device string as `0&1;2&3` -> stages, each a group of devices that share every layer of it.

`;` (or `,`) stands between stages, which have layers one after another; `&` (or `|`) between the devices of a stage,
which have parts of every tensor of its layers. A device is a number, of the target that the model is compiled for, or
`cpu`, `cpu:1`, `cuda:0`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmc.compiler.errors import LlmcError

DEVICES = 4096  # in one string
SHARE = 1_000_000  # the greatest number of a split
_NAME = re.compile(r"(?:(cpu|cuda)(?::(\d{1,4}))?|(\d{1,4}))", re.ASCII)
_WANTED = "wanted a number, cpu, cpu:N, cuda or cuda:N"


@dataclass(frozen=True)
class Device:
    """One device. `kind` is cpu, cuda, or nothing where the string only has numbers: that of the target."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}" if self.kind else str(self.number)


@dataclass(frozen=True)
class Placement:
    """Devices by stage and place in it, and of each how much it takes, relative to the others.

    A device's rank is its place in the string, from 0. Raises LlmcError where there is no device, one without a share
    of at least 1, or the same one twice.
    """

    stages: tuple[tuple[Device, ...], ...]
    shares: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        devices = [device for stage in self.stages for device in stage]
        if not devices or any(not stage for stage in self.stages):
            raise LlmcError("placement: a stage without a device")
        if [len(stage) for stage in self.stages] != [len(stage) for stage in self.shares]:
            raise LlmcError("placement: wanted a share for each device")
        if any(not 1 <= share <= SHARE for stage in self.shares for share in stage):
            raise LlmcError(f"placement: a share is a whole number from 1 to {SHARE}")
        twice = sorted({str(device) for device in devices if devices.count(device) > 1})
        if twice:
            raise LlmcError(f"placement: {', '.join(twice)} twice; a device has one place")

    def __str__(self) -> str:
        return ";".join("&".join(map(str, stage)) for stage in self.stages)

    @property
    def kind(self) -> str:
        """How the model is divided: "whole", by "layer", by "tensor" or "hybrid"."""
        shared = any(len(stage) > 1 for stage in self.stages)
        if len(self.stages) == 1:
            return "tensor" if shared else "whole"
        return "hybrid" if shared else "layer"

    def ranks(self, stage: int) -> range:
        """The ranks of a stage's devices."""
        first = sum(len(each) for each in self.stages[:stage])
        return range(first, first + len(self.stages[stage]))


def parse_placement(devices: str, split: str | None = None) -> Placement:
    """The placement of a device string; `split` is a share for each device in order, as `3:1`, else all are equal.

    >>> str(parse_placement("0 & 1; 2 & 3"))
    '0&1;2&3'
    >>> parse_placement("cpu;cuda:0", "1:3").shares
    ((1,), (3,))

    Raises LlmcError naming what is not understood.
    """
    stages = tuple(
        tuple(_device(name.strip(), devices) for name in re.split("[&|]", stage)) for stage in re.split("[;,]", devices)
    )
    named = [device for stage in stages for device in stage]
    if len(named) > DEVICES:
        raise LlmcError(f"devices: {len(named)} of them, at most {DEVICES}")
    if len({device.kind == "" for device in named}) > 1:
        raise LlmcError(f"devices {devices!r}: numbers alone and named devices; name the kind of all, as cuda:0")
    counts = [len(stage) for stage in stages]
    numbers = iter(_split(split, len(named)))
    return Placement(stages, tuple(tuple(next(numbers) for _ in range(count)) for count in counts))


def _device(name: str, devices: str) -> Device:
    found = _NAME.fullmatch(name)
    if found is None:
        what = f"{name[:40]!r} is no device" if name else "a place without a device"
        raise LlmcError(f"devices {devices[:200]!r}: {what}; {_WANTED}")
    kind, number, alone = found.groups()
    return Device("", int(alone)) if alone else Device(kind, int(number or 0))


def _split(split: str | None, count: int) -> list[int]:
    if split is None:
        return [1] * count
    parts = [part.strip() for part in split.split(":")]
    if any(not re.fullmatch("[0-9]{1,7}", part) or not 1 <= int(part) <= SHARE for part in parts):
        raise LlmcError(f"split {split[:200]!r}: wanted whole numbers from 1 to {SHARE}, one a device, as 3:1")
    if len(parts) != count:
        raise LlmcError(
            f"split {split[:200]!r}: {len(parts)} numbers for {count} devices; one a device, in their order"
        )
    return [int(part) for part in parts]
