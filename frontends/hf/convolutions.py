"""What config.json says about layers with a convolution, and of MLPs whose width is not what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.spec import range_fault
from llmc.compiler.spec.fields import clip


@dataclass(frozen=True)
class Convolutions:
    """Which layers have one in place of attention, over `size_key` tokens, `size` when absent.

    Those that `types_key` lists as the last of `names`; or else all that are not in the list of `attention_key`, which
    when absent has all. "": the family has no such key.
    """

    size_key: str
    size: int
    types_key: str
    names: tuple[str, ...]
    attention_key: str = ""

    def keys(self) -> tuple[str, ...]:
        """The keys that the family reads for this."""
        return tuple(key for key in (self.size_key, self.types_key, self.attention_key) if key)


@dataclass(frozen=True)
class Adjusted:
    """sizes.ffn is two thirds of what its key says, times `times_key`, up to a multiple of `multiple_key`.

    Not where `switch_key` is false. Each product is cut to a whole number. `switch`, `times` and `multiple` are what
    absent keys mean.
    """

    switch_key: str
    switch: bool
    times_key: str
    times: float
    multiple_key: str
    multiple: int

    def keys(self) -> tuple[str, ...]:
        """The keys that the family reads for this."""
        return self.switch_key, self.times_key, self.multiple_key


def convolutions(
    config: Mapping[str, Any], rule: Convolutions | None, layers: int | None, faults: list[str]
) -> dict[str, Any]:
    """The settings "convolution.*", {} where no layer has one. `layers`: how many, if that is known."""
    if rule is None or not layers:
        return {}
    members = _members(config, rule, layers, faults)
    size = config.get(rule.size_key, rule.size)
    if not members:
        return {}
    if fault := range_fault("convolution.size", size, rule.size_key):
        faults.append(fault)
        return {}
    return {"convolution.size": size, "convolution.layers": members}


def _members(config: Mapping[str, Any], rule: Convolutions, layers: int, faults: list[str]) -> tuple[int, ...]:
    types = config.get(rule.types_key)
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not all(kind in rule.names for kind in types):
            faults.append(f"{rule.types_key} = {clip(types)}, wanted {layers} times {' or '.join(rule.names)}")
            return ()
        return tuple(i for i, kind in enumerate(types) if kind == rule.names[-1])
    attending = config.get(rule.attention_key)
    if attending is None:
        return ()
    if not isinstance(attending, list) or not all(type(i) is int and 0 <= i < layers for i in attending):
        faults.append(f"{rule.attention_key} = {clip(attending)}, wanted a list of layers from 0 to {layers - 1}")
        return ()
    return tuple(i for i in range(layers) if i not in set(attending))


def adjusted(config: Mapping[str, Any], rule: Adjusted | None, ffn: Any, faults: list[str]) -> dict[str, Any]:
    """The setting "sizes.ffn" where the width `ffn` that a key says is to be adjusted, else {}."""
    if rule is None or type(ffn) is not int:
        return {}
    switch = config.get(rule.switch_key, rule.switch)
    times = config.get(rule.times_key, rule.times)
    multiple = config.get(rule.multiple_key, rule.multiple)
    wrong = {
        f"{rule.switch_key} = {clip(switch)}, wanted true or false": not isinstance(switch, bool),
        f"{rule.times_key} = {clip(times)}, wanted a number from 0.01 to 100": (
            type(times) not in (int, float) or not 0.01 <= times <= 100
        ),
        f"{rule.multiple_key} = {clip(multiple)}, wanted a whole number from 1 to 65536": (
            type(multiple) is not int or not 1 <= multiple <= 65536
        ),
    }  # fmt: skip
    faults += [fault for fault, there in wrong.items() if there]
    if any(wrong.values()) or not switch:
        return {}
    width = int(times * int(2 * ffn / 3))
    width = -(-width // multiple) * multiple
    if fault := range_fault("sizes.ffn", width):
        faults.append(fault)
        return {}
    return {"sizes.ffn": width}
