"""What a GGUF file says about yarn, a rope whose frequencies and scores change for long texts.

Source: llama.cpp's ggml/src/ggml-cpu/ops.cpp, rope_yarn and ggml_rope_yarn_corr_dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmc.compiler.spec import range_fault

KIND = "rope.scaling.type"
_FACTOR, _MAGNITUDE = "rope.scaling.factor", "rope.scaling.attn_factor"
_NUMBERS = {
    _FACTOR: "scaling.factor",
    "rope.scaling.original_context_length": "scaling.original_context",
    "rope.scaling.yarn_beta_slow": "scaling.low",
    "rope.scaling.yarn_beta_fast": "scaling.high",
    _MAGNITUDE: "scaling.magnitude",
}


def yarn_settings(
    own: Mapping[str, Any], kind: str, round_ends: bool, faults: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is left of `own`, the keys after "`kind`.", and fields of the spec; all of `own` where yarn is not on."""
    if own.get(KIND) != "yarn":
        return dict(own), {}
    settings: dict[str, Any] = {"scaling.kind": "yarn", "scaling.round_ends": round_ends}
    settings |= {"scaling.low": 1.0, "scaling.high": 32.0, "scaling.magnitude": 1.0}
    for key, path in _NUMBERS.items():
        if key in own and (fault := range_fault(path, own[key], f"{kind}.{key}")):
            faults.append(fault)
        elif key in own:
            settings[path] = own[key]
    missing = [path for path in ("scaling.factor", "scaling.original_context") if path not in settings]
    faults += [f"{kind}.{KIND} = 'yarn', but {path} is not said" for path in missing]
    settings["scaling.magnitude"] *= 1 + 0.1 * math.log(settings.get("scaling.factor", 1.0))
    return {key: value for key, value in own.items() if key not in (KIND, *_NUMBERS)}, settings
