"""What a GGUF file of a T5 says: an encoder-decoder, whose layers are enc.blk and dec.blk.

Source: llama.cpp's src/llama-model.cpp and its graphs of t5, and its conversion of T5: `block_count` is the encoder's.
The greatest distance that has a bucket of its own is not told: it is 128 for all, as in T5, mT5 and umT5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmc.compiler.spec.fields import clip

_COUNT, _DECODER_COUNT = "block_count", "decoder_block_count"
_START = "decoder_start_token_id"
_EPS, _SAME_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_NEVER_USED = "cross_attn_rel_b.weight"  # T5's first code had it, and added it to nothing

SETTINGS = {
    "mlp.kind": "plain", "mlp.activation": "relu", "position.kind": "relative", "position.distance": 128,
}  # fmt: skip
NUMBERS = {
    _COUNT: "encoder.layers", _DECODER_COUNT: "sizes.layers",
    "attention.relative_buckets_count": "position.buckets",
}  # fmt: skip
ONLY = {"attention.scale": (1.0,)}
REQUIRED = ("attention.relative_buckets_count",)
GATED = {"mlp.kind": "gated", "mlp.activation": "gelu_tanh"}  # T5 1.1, FLAN-T5, mT5, umT5


def _stack(ours: str, file: str, **more: str) -> dict[str, str]:
    """Our names with this prefix -> the names of a stack's tensors in the file."""
    parts = {"attention_norm": "attn_norm", **{x: f"attn_{x}" for x in "qkvo"}, "mlp_norm": "ffn_norm"}
    parts |= {x: f"ffn_{x}" for x in ("gate", "up", "down")} | more
    names = {f"{ours}layers.{{layer}}.{part}": f"{file}.blk.{{layer}}.{name}.weight" for part, name in parts.items()}
    shared = {"final_norm": "output_norm", "relative_bias": "blk.0.attn_rel_b"}
    return names | {f"{ours}{part}": f"{file}.{name}.weight" for part, name in shared.items()}


_CROSS = {"cross_norm": "cross_attn_norm", **{f"cross_{x}": f"cross_attn_{x}" for x in "qkvo"}}
TENSORS = _stack("encoder.", "enc") | _stack("", "dec", **_CROSS)
# Where not only the first layer has a table of distances: umT5.
OWN_TABLES = {
    f"{ours}layers.{{layer}}.relative_bias": f"{file}.blk.{{layer}}.attn_rel_b.weight"
    for ours, file in (("encoder.", "enc"), ("", "dec"))
}


def encoder_settings(own: Mapping[str, Any], kind: str, faults: list[str]) -> tuple[dict[str, Any], int | None]:
    """What is left of `own`, the keys after "`kind`.", with as many layers in both stacks where one number is told; and
    the first token of an answer.
    """
    rest = dict(own)
    if _COUNT in own:
        rest.setdefault(_DECODER_COUNT, own[_COUNT])
    if _SAME_EPS in rest and rest.pop(_SAME_EPS) != own.get(_EPS):
        faults.append(f"{kind}.{_SAME_EPS} = {clip(own[_SAME_EPS])}, but {kind}.{_EPS} = {clip(own.get(_EPS))}")
    if _START not in own:
        faults.append(f"missing key {kind}.{_START}")
        return rest, None
    start = rest.pop(_START)
    if type(start) is not int or start < 0:
        faults.append(f"{kind}.{_START} = {clip(start)}, wanted an id of a token")
    return rest, start


def more_settings(settings: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """What follows for T5: scores have no scale, both stacks are as wide, and logits of the `tied` head have one."""
    more: dict[str, Any] = {"attention.scale": 1.0}
    if "sizes.ffn" in settings:
        more["encoder.ffn"] = settings["sizes.ffn"]
    if tied and "sizes.hidden" in settings:
        more["head.scale"] = settings["sizes.hidden"] ** -0.5
    return more


def never_used(names: Iterable[str]) -> set[str]:
    """Those tensors of a file that no T5 reads."""
    return {name for name in names if name.startswith("dec.blk.") and name.endswith(_NEVER_USED)}
