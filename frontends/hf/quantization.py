"""`quantization_config` of config.json: how a folder packs weights that are quantized already. Rows of data.

Keys and defaults: transformers/utils/quantization_config.py (AwqConfig, GPTQConfig, Mxfp4Config, FineGrainedFP8Config,
BitsAndBytesConfig), and what AutoAWQ, AutoGPTQ and GPTQModel write. compressed_tensors.py, mlx.py and modelopt.py have
the tables that are not as flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.compiler.spec.fields import clip, near
from llmc.frontends.hf import compressed_tensors, mlx, modelopt
from llmc.frontends.quantized.bitsandbytes import BnbPacking
from llmc.frontends.quantized.fp4 import ExpertsPacking
from llmc.frontends.quantized.packing import Packing
from llmc.frontends.quantized.scaled_floats import SquarePacking
from llmc.frontends.quantized.words import WordPacking

KEY = "quantization_config"
GROUP = 32  # a group's columns are a multiple of this
MAX_GROUP = 1 << 20
SQUARE = 128  # rows and columns that share a scale of 8-bit floats


@dataclass(frozen=True)
class _Method:
    """`only`: key -> its allowed values (texts in small letters), the first of which an absent key means.

    `packing`: what values of `only` and the table say. `wanted`: keys that must be there.
    """

    packing: Callable[[Mapping[str, Any], Mapping[str, Any]], Packing | str]  # or what is wrong with them together
    only: dict[str, tuple[Any, ...]]
    off: dict[str, str]  # key -> why it must be off
    irrelevant: frozenset[str]
    wanted: tuple[str, ...] = ("bits", "group_size")


def _awq(values: Mapping[str, Any], table: Mapping[str, Any]) -> Packing:
    return WordPacking("AWQ", values["bits"], int(table["group_size"]))


def _gptq(values: Mapping[str, Any], table: Mapping[str, Any]) -> Packing:
    first = "gptq_v2" not in (values["checkpoint_format"], values["format"])
    return WordPacking("GPTQ", values["bits"], int(table["group_size"]), int(first), values["sym"], values["desc_act"])


def _bitsandbytes(values: Mapping[str, Any], table: Mapping[str, Any]) -> Packing | str:
    flags = values["load_in_4bit"], values["load_in_8bit"]
    if flags[0] == flags[1]:
        return f"{KEY}: load_in_4bit and load_in_8bit are both {flags[0]}, wanted one of them"
    return BnbPacking(4 if flags[0] else 8)


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
        _awq,
        only={
            "bits": (4,),
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
        _gptq,
        only={
            "bits": (4, 2, 3, 8),
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
        lambda values, table: SquarePacking(SQUARE),
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
    "mxfp4": _Method(
        lambda values, table: ExpertsPacking(),
        only={},
        off={},
        irrelevant=frozenset(("dequantize", "modules_to_not_convert")),
        wanted=(),
    ),
    "bitsandbytes": _Method(
        _bitsandbytes,
        only={
            "load_in_4bit": (False, True),
            "load_in_8bit": (False, True),
            "bnb_4bit_quant_storage": ("uint8",),
        },
        off={},
        # The tensors say which map 4 bits have and whether their scales are quantized; the rest is for a runtime.
        irrelevant=frozenset(
            (
                "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type",
                "bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
                "llm_int8_skip_modules", "llm_int8_threshold",
            )
        ),
        wanted=(),
    ),
}  # fmt: skip
_TABLES: dict[str, Callable[[Mapping[str, Any], str, list[str]], Packing | None]] = {
    "compressed-tensors": compressed_tensors.packing_of,
    modelopt.METHOD: modelopt.packing_of,
}
_KNOWN = (*METHODS, *_TABLES)


def packing_of(config: dict[str, Any], faults: list[str]) -> Packing | None:
    """What config.json says of quantized weights; None when it says nothing, or after adding to `faults`."""
    if mlx.KEY in config:
        return mlx.packing_of(config, KEY, faults)
    table = config.get(KEY)
    if table in (None, False, {}, []):
        return None
    if not isinstance(table, dict):
        faults.append(f"{KEY} = {clip(table)}, wanted a table or null")
        return None
    name = table.get("quant_method")
    if not isinstance(name, str) or name.lower() not in _KNOWN:
        faults.append(
            f"{KEY}.quant_method is {clip(name)}, llmc keeps: {', '.join(_KNOWN)}; "
            "for others use the unquantized model and --quant"
        )
        return None
    if name.lower() in _TABLES:
        return _TABLES[name.lower()](table, KEY, faults)
    found = _flat(table, name.lower())
    if isinstance(found, list):
        faults += found
        return None
    return found


def _flat(table: dict[str, Any], name: str) -> Packing | list[str]:
    """What the table of one of METHODS says, or what is wrong with it."""
    method = METHODS[name]
    faults = [f"{KEY}: missing key {key}" for key in method.wanted if key not in table]
    faults += _bad_keys(table, method)
    values = {key: _small(table.get(key, allowed[0])) for key, allowed in method.only.items()}
    for key, allowed in method.only.items():
        if not any(values[key] == known and type(values[key]) is type(known) for known in allowed):
            listed = ", ".join(map(repr, allowed))
            faults.append(f"{KEY}.{key} = {clip(table[key])}, llmc reads {listed} with quant_method {name}")
    formats = {values[key] for key in ("checkpoint_format", "format") if key in table and isinstance(values[key], str)}
    if len(formats) > 1:
        faults.append(f"{KEY}: checkpoint_format and format disagree: {', '.join(sorted(map(clip, formats)))}")
    group = table.get("group_size")
    if "group_size" in table and not _is_group(group):
        faults.append(f"{KEY}.group_size = {clip(group)}, wanted a multiple of {GROUP}, or -1 for whole rows")
    if faults:
        return faults
    found = method.packing(values, table)
    return [found] if isinstance(found, str) else found


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
