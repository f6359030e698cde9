"""What a GGUF file says about layers with a convolution: they are those without heads of keys and values.

Source: llama.cpp's src/llama-arch.cpp (names), convert_hf_to_gguf.py (class LFM2Model).
"""

from __future__ import annotations

from typing import Any

from llmc.compiler.spec.fields import clip

_LAYER = "blk.{layer}"
HEADS, SIZE = "attention.head_count_kv", "shortconv.l_cache"
NUMBERS = {SIZE: "convolution.size"}
TENSORS = {
    "layers.{layer}.conv_in": f"{_LAYER}.shortconv.in_proj.weight",
    "layers.{layer}.conv": f"{_LAYER}.shortconv.conv.weight | transposed",
    "layers.{layer}.conv_out": f"{_LAYER}.shortconv.out_proj.weight",
    "final_norm": "token_embd_norm.weight",
}


def convolution_settings(
    own: dict[str, Any], kind: str, faults: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Keys after "`kind`." with one number of heads, and the layers with a convolution as settings."""
    heads = own.get(HEADS)
    if not isinstance(heads, list):
        return {key: value for key, value in own.items() if key != SIZE}, {}
    attending = {count for count in heads if count != 0} if all(type(count) is int for count in heads) else set()
    if len(attending) != 1 or own.get("block_count") != len(heads):
        faults.append(f"{kind}.{HEADS} = {clip(heads)}, wanted a number for each layer, 0 or the same as others")
        return {key: value for key, value in own.items() if key != HEADS}, {}
    layers = tuple(layer for layer, count in enumerate(heads) if count == 0)
    if not layers:
        return convolution_settings({**own, HEADS: attending.pop()}, kind, faults)
    if SIZE not in own:
        faults.append(f"missing key {kind}.{SIZE}")
    return {**own, HEADS: attending.pop()}, {"convolution.layers": layers}
