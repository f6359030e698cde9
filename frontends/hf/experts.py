"""What config.json says about which layers have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.spec.fields import clip


@dataclass(frozen=True)
class ExpertLayers:
    """Which layers have experts: all, but for what these keys say, each of which the family has where it is not "".

    `first_key`: the first so many have none, `first` when absent. `last_key`: the last that has them, -1 for no last.
    `step_key`: only every so many-th has them, `step` when absent. `plain_key`: a list of layers that have none.
    `types_key`: a list of "dense" and "sparse", which stands above all of that.
    """

    first_key: str = ""
    first: int = 0
    last_key: str = ""
    step_key: str = ""
    step: int = 1
    plain_key: str = ""
    types_key: str = ""

    def keys(self) -> tuple[str, ...]:
        """The keys that the family reads for this."""
        keys = (self.first_key, self.last_key, self.step_key, self.plain_key, self.types_key)
        return tuple(key for key in keys if key)


def expert_layers(
    config: Mapping[str, Any], rule: ExpertLayers | None, layers: int | None, faults: list[str]
) -> dict[str, Any]:
    """The setting "experts.layers" of a family with experts, {} for others. `layers`: how many, if that is known."""
    if rule is None or not layers:
        return {}
    types = config.get(rule.types_key) if rule.types_key else None
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not all(t in ("dense", "sparse") for t in types):
            faults.append(f"{rule.types_key} = {clip(types)}, wanted {layers} times dense or sparse")
            return {}
        return {"experts.layers": tuple(i for i, kind in enumerate(types) if kind == "sparse")}
    first = _whole(config, rule.first_key, rule.first, 0, faults)
    step = _whole(config, rule.step_key, rule.step, 1, faults)
    last = _whole(config, rule.last_key, -1, -1, faults)
    plain = (config.get(rule.plain_key) if rule.plain_key else None) or []
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        faults.append(f"{rule.plain_key} = {clip(plain)}, wanted a list of layers")
        return {}
    inside = range(first, layers if last < 0 else min(last + 1, layers))
    found = tuple(i for i in inside if (i + 1) % step == 0 and i not in set(plain))
    if not found:
        faults.append(f"{', '.join(rule.keys())}: none of the {layers} layers has experts")
    return {"experts.layers": found}


def _whole(config: Mapping[str, Any], key: str, absent: int, least: int, faults: list[str]) -> int:
    """The key's value, or what its absence means."""
    value = config.get(key, absent) if key else absent
    if type(value) is not int or value < least:
        faults.append(f"{key} = {clip(value)}, wanted a whole number from {least}")
        return absent
    return value
