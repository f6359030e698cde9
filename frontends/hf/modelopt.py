"""What NVIDIA's Model Optimizer says of a folder's weights, in config.json or in a file of its own.

Keys: https://github.com/NVIDIA/Model-Optimizer (modelopt/torch/export/convert_hf_config.py, quant_utils.py). Which
layers are quantized, and how, is not read: the tensors of a layer tell by their types and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec.fields import clip, near
from llmc.frontends.quantized.modelopt import ModelOptPacking

FILE = "hf_quant_config.json"  # of exports whose config.json says nothing
METHOD = "modelopt"
_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "W4A8_MXFP4_FP8", "W8A16",
)  # fmt: skip
_MIXED = "MIXED_PRECISION"
_KEYS = frozenset(("quant_algo", "quant_method", "quantized_layers"))
_IRRELEVANT = frozenset(
    (
        "config_groups", "exclude_modules", "group_size", "has_zero_point", "ignore", "kv_cache_quant_algo",
        "kv_cache_scheme", "pre_quant_scale", "producer",
    )
)  # fmt: skip


def as_in_config(said: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """What FILE says, as it would stand in config.json."""
    table = said.get("quantization")
    if not isinstance(table, dict):
        faults.append(f"quantization = {clip(table)}, wanted a table")
        return {}
    return table | {"quant_method": METHOD}


def packing_of(table: Mapping[str, Any], key: str, faults: list[str]) -> ModelOptPacking | None:
    """What the table at `key` says; None after adding to `faults`."""
    found: list[str] = []
    if unknown := [near(name, _KEYS) for name in table if name not in _KEYS | _IRRELEVANT]:
        found.append(f"{key}: unknown keys {', '.join(unknown)}: llmc does not guess what they do to the weights")
    algorithm = table.get("quant_algo")
    given = [(f"{key}.quant_algo", algorithm)]
    if algorithm == _MIXED:
        layers = table.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            found.append(f"{key}.quantized_layers = {clip(layers)}, wanted a table of tables")
            layers = {}
        each = {clip(layer.get("quant_algo")): layer.get("quant_algo") for layer in layers.values()}
        given = [(f"{key}.quantized_layers", value) for value in each.values()]
    for place, value in given:
        if not isinstance(value, str) or value.upper() not in _ALGORITHMS:
            found.append(f"{place} has {clip(value)}, llmc reads {', '.join(_ALGORITHMS)}")
    faults += found
    return None if found else ModelOptPacking()
