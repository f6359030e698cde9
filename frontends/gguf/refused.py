"""Architectures of GGUF files that llmc has no block for: `general.architecture` -> what is lacking."""

from __future__ import annotations

from llmc.frontends.gguf import encoders

_STATES = dict.fromkeys(("mamba", "mamba2"), "its layers are state spaces")
_MIXED = dict.fromkeys(
    ("jamba", "falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe", "plamo2"),
    "its layers have state spaces beside attention",
)
_RECURRENT = dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), "its layers are recurrent")
_LINEAR = dict.fromkeys(("qwen3next", "qwen35", "qwen35moe", "kimi-linear"), "its layers have linear attention")
_DIFFUSION = dict.fromkeys(("dream", "llada", "llada-moe"), "its text is not made from left to right")

REFUSED = {
    **encoders.REFUSED,
    **_STATES,
    **_MIXED,
    **_RECURRENT,
    **_LINEAR,
    **_DIFFUSION,
    "arctic": "its layers have an MLP beside their experts",
    "openelm": "its layers differ in their numbers of heads",
    "bitnet": "its attention and MLP have a norm before their last matrix",
}
