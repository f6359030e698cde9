"""The table that mlx-lm has in config.json: how layers are quantized, and which of them in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec.fields import clip
from llmc.frontends.quantized.mlx import AFFINE, BITS, GROUPS, MODES, MlxLayer, MlxPacking

KEY = "quantization"
_KEYS = ("group_size", "bits", "mode")
_USUAL = MlxLayer(4, 64)  # MLX's defaults


def packing_of(config: Mapping[str, Any], other: str, faults: list[str]) -> MlxPacking | None:
    """What the table says, None after adding to `faults`; `other` is a key that has a copy of it, or nothing."""
    table = config[KEY]
    if not isinstance(table, dict):
        faults.append(f"{KEY} = {clip(table)}, wanted MLX's table")
        return None
    found = []
    if config.get(other) not in (None, table):
        found.append(f"{KEY} and {other} disagree; remove the one that does not describe the weights")
    usual = _layer({key: table.get(key) for key in _KEYS}, KEY, found)
    by_name = {}
    for name, own in table.items():
        if name not in _KEYS and type(own) is not bool:  # true is as all others, false is not quantized
            by_name[name] = _layer(own, f"{KEY}.{clip(name)}", found)
    faults += found
    return None if found else MlxPacking(usual, by_name)


def _layer(table: Any, where: str, faults: list[str]) -> MlxLayer:
    """What a table says; what it leaves out is MLX's default."""
    if not isinstance(table, dict) or not set(table) <= set(_KEYS):
        faults.append(f"{where} = {clip(table)}, wanted true, false or a table of {', '.join(_KEYS)}")
        return _USUAL
    said = {"bits": _USUAL.bits, "group_size": _USUAL.group, "mode": AFFINE}
    said |= {key: value for key, value in table.items() if value is not None}
    bits, group, mode = said["bits"], said["group_size"], said["mode"]
    if isinstance(mode, str) and mode in MODES:
        return MlxLayer(*MODES[mode], mode)
    if mode != AFFINE:
        faults.append(f"{where}.mode = {clip(mode)}, llmc reads {', '.join((AFFINE, *MODES))}")
        return _USUAL
    if type(bits) is not int or bits not in BITS or type(group) is not int or group not in GROUPS:
        faults.append(
            f"{where}: {clip(bits)} bits in groups of {clip(group)}, wanted {', '.join(map(str, BITS))} in groups of "
            f"{', '.join(map(str, GROUPS))}"
        )
        return _USUAL
    return MlxLayer(bits, group)
