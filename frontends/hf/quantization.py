"""`quantization_config` of config.json: how a folder packs weights that are quantized already. Rows of data.

llmc keeps 4-bit weights of three packings as they are: AWQ's "gemm", GPTQ's, and MXFP4; it reads 8-bit floats. Keys and
defaults: transformers/utils/quantization_config.py (AwqConfig, GPTQConfig, Mxfp4Config, FineGrainedFP8Config), and what
AutoAWQ, AutoGPTQ and GPTQModel write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.compiler.spec.fields import clip, near

KEY = "quantization_config"
BITS = 4
GROUP = 32  # a group's columns are a multiple of this
MAX_GROUP = 1 << 20
SQUARE = 128  # rows and columns that share a scale of 8-bit floats


@dataclass(frozen=True)
class Packing:
    """How each quantized linear layer of a folder is stored; int4_tensors.py reads it."""

    method: str  # "AWQ", "GPTQ", "MXFP4" or "FP8"
    group: int  # columns that share a scale and a zero; -1: all of a row
    zero_shift: int = 0  # zero = stored zero + this: 1 in GPTQ's first format
    symmetric: bool = False  # every zero is 8
    act_order: bool = False  # columns may be in groups of any order: g_idx has to be there

    def columns(self, width: int) -> int:
        """Columns of a group in a row of `width`."""
        return width if self.group == -1 else min(self.group, width)


@dataclass(frozen=True)
class _Method:
    """`only`: key -> its allowed values (texts in small letters), the first of which an absent key means.

    `wanted`: keys that must be there.
    """

    only: dict[str, tuple[Any, ...]]
    off: dict[str, str]  # key -> why it must be off
    irrelevant: frozenset[str]
    wanted: tuple[str, ...] = ("bits", "group_size")


# What the quantizer did, or how some runtime shall run the result: the tensors are the same.
_IRRELEVANT = frozenset(
    (
        "act_group_aware", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
        "damp_percent", "dataset", "disable_exllama", "exllama_config", "lm_head", "max_input_length", "meta",
        "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
        "modules_in_block_to_quantize", "modules_to_not_convert", "mse", "pad_token_id", "static_groups", "tokenizer",
        "true_sequential", "use_cuda_fp16", "use_exllama",
    )
)  # fmt: skip

_OFF = {
    "adapter": "llmc has no adapters yet",
    "dynamic": "llmc reads one packing for all layers",
    "rotation": "the model is not the one that config.json describes",
}

METHODS = {
    "awq": _Method(
        only={
            "bits": (BITS,),
            "version": ("gemm",),
            "format": ("gemm",),
            "checkpoint_format": ("gemm",),
            "zero_point": (True, False),
            "backend": ("auto", "autoawq", None),
            "pack_dtype": ("int32",),
        },
        off=_OFF,
        # AwqConfig inherits keys of GPTQ that say nothing here.
        irrelevant=_IRRELEVANT | {"desc_act", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "sym"},
    ),
    "gptq": _Method(
        only={
            "bits": (BITS,),
            "checkpoint_format": ("gptq", "gptq_v2"),
            "format": ("gptq", "gptq_v2"),
            "desc_act": (False, True),
            "sym": (False, True),  # absent: nothing is promised about the zeros
            "pack_dtype": ("int32",),
        },
        off={**_OFF, "is_marlin_format": "llmc does not read Marlin's packing; convert it to checkpoint_format gptq"},
        irrelevant=_IRRELEVANT | {"backend"},
    ),
    "fp8": _Method(
        only={
            "activation_scheme": ("dynamic",),
            "fmt": ("e4m3",),
            "weight_block_size": ([SQUARE, SQUARE],),
            "scale_fmt": ("float", "ue8m0", None),
            "dequantize": (False, True),
        },
        off={},
        irrelevant=frozenset(("modules_to_not_convert",)),
        wanted=(),
    ),
    "mxfp4": _Method(only={}, off={}, irrelevant=frozenset(("dequantize", "modules_to_not_convert")), wanted=()),
}

_FIXED = {"mxfp4": Packing("MXFP4", 32), "fp8": Packing("FP8", SQUARE)}  # that have no numbers to say


def packing_of(config: dict[str, Any], faults: list[str]) -> Packing | None:
    """What config.json says of quantized weights; None when it says nothing, or after adding to `faults`."""
    table = config.get(KEY)
    if table in (None, False, {}, []):
        return None
    if not isinstance(table, dict):
        faults.append(f"{KEY} = {clip(table)}, wanted a table or null")
        return None
    name = table.get("quant_method")
    if not isinstance(name, str) or name.lower() not in METHODS:
        faults.append(
            f"{KEY}.quant_method is {clip(name)}, llmc keeps: {', '.join(METHODS)}; "
            "for others use the unquantized model and --quant"
        )
        return None
    method, before = METHODS[name.lower()], len(faults)
    faults += [f"{KEY}: missing key {key}" for key in method.wanted if key not in table]
    faults += _bad_keys(table, method)
    values = {key: _small(table.get(key, allowed[0])) for key, allowed in method.only.items()}
    for key, allowed in method.only.items():
        if not any(values[key] == known and type(values[key]) is type(known) for known in allowed):
            listed = ", ".join(map(repr, allowed))
            faults.append(f"{KEY}.{key} = {clip(table[key])}, llmc reads {listed} with quant_method {name.lower()}")
    formats = {values[key] for key in ("checkpoint_format", "format") if key in table and isinstance(values[key], str)}
    if len(formats) > 1:
        faults.append(f"{KEY}: checkpoint_format and format disagree: {', '.join(sorted(map(clip, formats)))}")
    group = table.get("group_size")
    if "group_size" in table and not _is_group(group):
        faults.append(f"{KEY}.group_size = {clip(group)}, wanted a multiple of {GROUP}, or -1 for whole rows")
    if len(faults) > before:
        return None
    if name.lower() in _FIXED:
        return _FIXED[name.lower()]
    if name.lower() == "awq":
        return Packing("AWQ", int(table["group_size"]))
    first = formats != {"gptq_v2"}
    return Packing("GPTQ", int(table["group_size"]), int(first), values["sym"], values["desc_act"])


def _bad_keys(table: dict[str, Any], method: _Method) -> list[str]:
    faults = [
        f"{KEY}.{key} is set: {why}" for key, why in method.off.items() if table.get(key) not in (None, False, {}, [])
    ]
    meant = {"quant_method", *method.wanted, *method.only}
    unknown = [near(key, meant) for key in table if key not in meant | set(method.off) | method.irrelevant]
    if unknown:
        faults.append(f"{KEY}: unknown keys {', '.join(unknown)}: llmc does not guess what they do to the weights")
    return faults


def _small(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _is_group(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and (value == -1 or (0 < value <= MAX_GROUP and value % GROUP == 0))
