"""The table that compressed-tensors has in config.json: groups of layers, and how the weights of each are packed.

Keys: https://github.com/vllm-project/compressed-tensors (quantization/quant_args.py, quant_config.py). Which layers a
group names is not read: the tensors of a layer tell by their types and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec.fields import clip, near
from llmc.frontends.quantized.compressed import READERS, WHOLE, CompressedPacking, Scheme

_MAX = 1 << 20  # rows and columns of a scale
_KEYS = frozenset(
    ("config_groups", "format", "quant_method", "quantization_status", "sparsity_config", "transform_config")
)
_IRRELEVANT = frozenset(
    ("global_compression_ratio", "ignore", "kv_cache_scheme", "run_compressed", "version", "quantization_format")
)
_GROUP_KEYS = frozenset(("format", "input_activations", "output_activations", "targets", "weights"))
_WEIGHT_KEYS = frozenset(
    (
        "actorder", "block_structure", "dynamic", "group_size", "num_bits", "observer", "observer_kwargs",
        "scale_dtype", "strategy", "symmetric", "type", "zp_dtype",
    )
)  # fmt: skip
_KINDS = {  # format -> type of its codes, and how many bits they may have
    "pack-quantized": ("int", range(1, 9)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
    "mxfp4-pack-quantized": ("float", (4,)),
    "nvfp4-pack-quantized": ("float", (4,)),
}


def packing_of(table: Mapping[str, Any], key: str, faults: list[str]) -> CompressedPacking | None:
    """What the table at `key` says; None after adding to `faults`."""
    found: list[str] = []
    if unknown := [near(name, _KEYS) for name in table if name not in _KEYS | _IRRELEVANT]:
        found.append(f"{key}: unknown keys {', '.join(unknown)}: llmc does not guess what they do to the weights")
    if table.get("quantization_status", "compressed") != "compressed":
        found.append(f"{key}.quantization_status = {clip(table['quantization_status'])}, wanted 'compressed'")
    sparsity = table.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        found.append(f"{key}.sparsity_config is set: llmc reads dense matrices; save the model with its zeros")
    if table.get("transform_config"):
        found.append(f"{key}.transform_config is set: the model is not the one that config.json describes")
    groups = table.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        found.append(f"{key}.config_groups = {clip(groups)}, wanted a table of groups")
        groups = {}
    schemes = []
    for name, group in groups.items():
        made = _scheme(group, table.get("format"))
        if isinstance(made, Scheme):
            schemes.append(made)
        else:
            found += [f"{key}.config_groups.{clip(name)}: {problem}" for problem in made]
    faults += found
    return None if found else CompressedPacking(tuple(dict.fromkeys(schemes)))


def _scheme(group: Any, usual: Any) -> Scheme | list[str]:
    """How a group's weights are packed, or what is wrong with it."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return [f"{clip(group)}, wanted a table with weights"]
    faults = [f"unknown key {near(name, _GROUP_KEYS)}" for name in group if name not in _GROUP_KEYS]
    faults += [f"weights: unknown key {near(name, _WEIGHT_KEYS)}" for name in weights if name not in _WEIGHT_KEYS]
    bits, kind, symmetric = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("symmetric", True)
    format = group.get("format") or usual
    if format == "naive-quantized":
        format = "float-quantized" if kind == "float" else "int-quantized"
    if not isinstance(format, str) or format not in READERS:
        return [*faults, f"format = {clip(format)}, llmc reads {', '.join(READERS)}"]
    wanted, allowed = _KINDS[format]
    if kind != wanted or type(bits) is not int or bits not in allowed:
        listed = ", ".join(map(str, allowed))
        faults.append(f"weights.num_bits = {clip(bits)} of type {clip(kind)}, wanted {listed} of {wanted} as {format}")
    if type(symmetric) is not bool or (not symmetric and format != "pack-quantized"):
        faults.append(f"weights.symmetric = {clip(symmetric)}, wanted true as {format}")
    if weights.get("dynamic") not in (None, False):
        faults.append(f"weights.dynamic = {clip(weights['dynamic'])}, wanted false")
    if weights.get("actorder") not in (None, False, "weight", "static", "group", "dynamic"):
        faults.append(f"weights.actorder = {clip(weights['actorder'])}")
    sides = _sides(weights, format)
    if isinstance(sides, str):
        return [*faults, sides]
    return faults or Scheme(format, bits, symmetric, *sides)


def _sides(weights: Mapping[str, Any], format: str) -> tuple[int, int] | str:
    """Rows and columns that share a scale, or what is wrong with them."""
    group, square, strategy = (weights.get(key) for key in ("group_size", "block_structure", "strategy"))
    if strategy is None:  # as compressed-tensors takes it
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "tensor" and format in ("pack-quantized", "int-quantized", "float-quantized"):
        return WHOLE, WHOLE
    if strategy == "channel" and format in ("pack-quantized", "int-quantized", "float-quantized"):
        return 1, WHOLE
    if strategy in ("group", "tensor_group") and type(group) is int and _is_side(group):
        fixed = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}.get(format, group)
        return (1, group) if group == fixed else f"weights.group_size = {clip(group)}, wanted {fixed} as {format}"
    sides = square if isinstance(square, list) and all(map(_is_side, square)) else []
    if strategy == "block" and format == "float-quantized" and len(sides) == 2:
        return sides[0], sides[1]
    return f"weights.strategy = {clip(strategy)} with group_size {clip(group)} and block_structure {clip(square)}"


def _is_side(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MAX
