"""Devices files and models that tests of the planner share."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from llmc.compiler.spec import ModelSpec, example
from llmc.compiler.spec.blocks import Attention, Sizes
from llmc.passes.plan.devices import Devices, read_devices

TWO = """
[[node]]
latency_us = 10
gb_s = 10
[[node.device]]
name = "0"
count = 2
memory_gb = 1
read_gb_s = 10
gops = { f32 = 100, bf16 = 200, int8 = 400 }
"""


def shape(layers: int = 4, hidden: int = 256, heads: int = 8, kv_heads: int = 4, **blocks: Any) -> ModelSpec:
    """A Llama-like spec of a size that times are not lost in rounding."""
    head = hidden // heads
    attention = Attention("gqa", heads=heads, kv_heads=kv_heads, head_dim=head, scale=1 / math.sqrt(head))
    sizes = Sizes(vocab=1024, hidden=hidden, layers=layers, ffn=3 * hidden, context=4096)
    return replace(example(), sizes=sizes, attention=attention, **blocks)


def devices(text: str = TWO, **values: object) -> Devices:
    """The file with other values of some keys."""
    for key, value in values.items():
        text, found = re.subn(f"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert found, key
    return read_devices(text)
