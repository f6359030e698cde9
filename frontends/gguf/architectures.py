"""What keys and tensors of a GGUF file mean, per `general.architecture`: rows of data, no code.

Source: llama.cpp's src/llama-arch.cpp (key and tensor names), src/llama-model.cpp (defaults, and what a file omits).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmc.frontends.gguf import convolutions, encoder_decoder, latent
from llmc.frontends.gguf.encoders import ENCODERS
from llmc.frontends.gguf.experts import Mixture
from llmc.frontends.gguf.rules import Architecture, Case, Found, WindowRule

# Key after "<architecture>." -> field of the spec.
NUMBERS = {
    "context_length": "sizes.context",
    "embedding_length": "sizes.hidden",
    "block_count": "sizes.layers",
    "feed_forward_length": "sizes.ffn",
    "attention.head_count": "attention.heads",
    "attention.head_count_kv": "attention.kv_heads",
    "attention.key_length": "attention.head_dim",
    "attention.value_length": "attention.head_dim",
    "rope.freq_base": "position.theta",
    "rope.scaling.factor": "position.factor",
    "attention.scale": "attention.scale",
    "vocab_size": "sizes.vocab",
}
REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
)
EPS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}  # norm.kind -> key
# Where the architecture has a WindowRule; where not, a window must be absent or 0.
WINDOW_SIZE = "attention.sliding_window"
WINDOW_NUMBERS = {WINDOW_SIZE: "window.size", "rope.freq_base_swa": "window.theta"}
WINDOW_PERIOD = "attention.sliding_window_pattern"
ROTATED = "rope.dimension_count"  # how much of a head rope turns; absent means all of it
SCALING = "rope.scaling.type"  # "none" takes the factor back; absent means linear
# Keys that say nothing where rope is not scaled by yarn or longrope.
IGNORED = ("rope.scaling.original_context_length",)
# Keys that must have one of these values: any other changes the model in a way llmc does not know.
ONLY: dict[str, tuple[Any, ...]] = {
    SCALING: ("none", "linear"),
    "rope.scale_linear": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),
}
NO_WINDOW: dict[str, tuple[Any, ...]] = {WINDOW_SIZE: (0,)}
DEFAULT_THETA = 10000.0

_LAYER = "blk.{layer}"
TENSORS = {
    "embedding": "token_embd.weight",
    "layers.{layer}.attention_norm": f"{_LAYER}.attn_norm.weight",
    "layers.{layer}.q": f"{_LAYER}.attn_q.weight",
    "layers.{layer}.k": f"{_LAYER}.attn_k.weight",
    "layers.{layer}.v": f"{_LAYER}.attn_v.weight",
    "layers.{layer}.o": f"{_LAYER}.attn_output.weight",
    "layers.{layer}.mlp_norm": f"{_LAYER}.ffn_norm.weight",
    "layers.{layer}.gate": f"{_LAYER}.ffn_gate.weight",
    "layers.{layer}.up": f"{_LAYER}.ffn_up.weight",
    "layers.{layer}.down": f"{_LAYER}.ffn_down.weight",
    "final_norm": "output_norm.weight",
}


def _biases(*parts: str) -> dict[str, str]:
    return {f"layers.{{layer}}.{ours}_bias": f"{_LAYER}.{file}.bias" for ours, file in (p.split(":") for p in parts)}


def _fused(file: str, parts: str, suffix: str) -> dict[str, str]:
    """Our names -> the parts of a fused tensor of a layer."""
    ending = "_bias" if suffix == "bias" else ""
    return {f"layers.{{layer}}.{part}{ending}": f"{_LAYER}.{file}.{suffix} | {parts}" for part in parts.split()}


# What any file may have or not; without them a model has no biases, and its head is the embedding.
FOUND = (
    Found(f"{_LAYER}.attn_qkv.weight", {}, _fused("attn_qkv", "q k v", "weight")),
    Found(f"{_LAYER}.attn_qkv.bias", {"attention.bias": True}, _fused("attn_qkv", "q k v", "bias")),
    Found(f"{_LAYER}.attn_q.bias", {"attention.bias": True}, _biases("q:attn_q", "k:attn_k", "v:attn_v")),
    Found(f"{_LAYER}.attn_output.bias", {"attention.output_bias": True}, _biases("o:attn_output")),
    Found(f"{_LAYER}.ffn_up.bias", {"mlp.bias": True}, _biases("gate:ffn_gate", "up:ffn_up", "down:ffn_down")),
    Found("output.weight", {"head.tied": False}, {"head": "output.weight"}),
    Found("output.bias", {"head.bias": True}, {"head_bias": "output.bias"}),
)
_QK_NORM = {f"layers.{{layer}}.{x}_norm": f"{_LAYER}.attn_{x}_norm.weight" for x in "qk"}
_POST_NORMS = {
    "layers.{layer}.attention_post_norm": f"{_LAYER}.post_attention_norm.weight",
    "layers.{layer}.mlp_post_norm": f"{_LAYER}.post_ffw_norm.weight",
}

# Vectors that rope's frequencies are divided by: fields of the spec. Files that have them may have FACTOR_NUMBERS.
FACTORS = {
    "rope_freqs.weight": ("scaling.short", "scaling.long"),
    "rope_factors_short.weight": ("scaling.short",),
    "rope_factors_long.weight": ("scaling.long",),
}
FACTOR_NUMBERS = {
    "rope.scaling.original_context_length": "scaling.original_context",
    "rope.scaling.attn_factor": "scaling.magnitude",
}

_POST_ATTENTION = f"{_LAYER}.post_attention_norm.weight"
_SWIGLU = {"mlp.activation": "silu"}
_PAIRS, _HALVES = {"position.layout": "interleaved"}, {"position.layout": "half"}
# llama_model_rope_type; where a model's own layout is halves, the converter permutes q and k (its method permute).
_LLAMA = _SWIGLU | _PAIRS
_GEMMA = {"mlp.activation": "gelu_tanh"} | _HALVES
_PLAIN_MLP = {"mlp.kind": "plain", "mlp.activation": "gelu_tanh"}
_LAYER_NORM = {"norm.kind": "layer"}
_GPT = _LAYER_NORM | _PLAIN_MLP
_LEARNED, _ALIBI = {"position.kind": "learned"}, {"position.kind": "alibi"}
_POSITIONS = {"positions": "position_embd.weight"}
_GATE_UP = _fused("ffn_up", "gate up", "weight")
_NORM_BIASES = Found(
    "output_norm.bias",
    {"norm.bias": True},
    {"final_norm_bias": "output_norm.bias"} | _biases("attention_norm:attn_norm", "mlp_norm:ffn_norm"),
)
_EMBEDDING_NORM = {"embedding_norm": "token_embd_norm.weight", "embedding_norm_bias": "token_embd_norm.bias"}
# Falcon 40B has a norm for attention besides that for the MLP.
_SECOND_NORM = Found(
    f"{_LAYER}.attn_norm_2.weight",
    {"wiring.order": "parallel"},
    {
        "layers.{layer}.attention_norm": f"{_LAYER}.attn_norm_2.weight",
        "layers.{layer}.mlp_norm": f"{_LAYER}.attn_norm.weight",
    }
    | _biases("attention_norm:attn_norm_2", "mlp_norm:attn_norm"),
)
_TWO_NORMS = Found(f"{_LAYER}.ffn_norm.weight", {"wiring.order": "sequential"}, {})

_MULTIPLIERS = {
    "embedding_scale": "embedding.scale",
    "residual_scale": "wiring.residual_scale",
    "logit_scale": "head.scale",
}
_HUNYUAN = _SWIGLU | _HALVES | {"attention.qk_norm": "head", "attention.qk_norm_place": "after_rope"}
_RENORMALIZED = {"experts.renormalize": True}

_LFM2 = Architecture(
    _SWIGLU | _HALVES | {"attention.qk_norm": "head"},
    _QK_NORM | convolutions.TENSORS,
    numbers=convolutions.NUMBERS,
    found=(Found("output_norm.weight", {}, {"final_norm": "output_norm.weight"}),),  # some converters' name
    convolved=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    **ENCODERS,
    "llama": Architecture(_LLAMA, yarn="rounded", experts=Mixture(_RENORMALIZED, wide=True, optional=True)),
    "qwen2": Architecture(_SWIGLU | _HALVES, yarn="rounded"),
    "qwen2moe": Architecture(_SWIGLU | _HALVES, experts=Mixture({"experts.shared_gate": True})),
    "qwen3moe": Architecture(
        _SWIGLU | _HALVES | {"attention.qk_norm": "head"}, _QK_NORM, experts=Mixture(_RENORMALIZED)
    ),
    "qwen3": Architecture(_SWIGLU | _HALVES | {"attention.qk_norm": "head"}, _QK_NORM, yarn="rounded"),
    # The converter adds the one that Gemma's norms' weights lack, and Nemotron's, so they are plain here.
    "gemma": Architecture(_GEMMA, scaled_embedding=True),
    "gemma2": Architecture(
        _GEMMA | {"norm.place": "sandwich", "attention.soft_cap": 50.0, "head.soft_cap": 30.0},
        _POST_NORMS,
        numbers={"attn_logit_softcapping": "attention.soft_cap", "final_logit_softcapping": "head.soft_cap"},
        scaled_embedding=True,
        width_scaled=(46,),
        window=WindowRule(period=2, size=4096),
    ),
    "gemma3": Architecture(
        _GEMMA | {"attention.qk_norm": "head", "norm.place": "sandwich"},
        _QK_NORM | _POST_NORMS,
        scaled_embedding=True,
        width_scaled=(62,),
        window=WindowRule(period=6, theta=10000.0),
    ),
    "gpt2": Architecture(_GPT | _LEARNED, _POSITIONS, found=(_NORM_BIASES,)),
    "phi2": Architecture(_GPT | _HALVES | {"wiring.order": "shared"}, found=(_NORM_BIASES,), partial=True),
    "phi3": Architecture(_SWIGLU | _HALVES, _GATE_UP, window=WindowRule(period=None, size=0), partial=True),
    "starcoder": Architecture(_GPT | _LEARNED, _POSITIONS, found=(_NORM_BIASES,)),
    "starcoder2": Architecture(_GPT | _HALVES, found=(_NORM_BIASES,)),
    "qwen": Architecture(_SWIGLU | _HALVES, stored={"feed_forward_length": "double"}),
    "stablelm": Architecture(
        _LAYER_NORM | _SWIGLU | _HALVES | {"wiring.order": "shared"},
        flags={"use_parallel_residual": {True: {}, False: {}}},  # true as well where the norms say otherwise
        found=(_NORM_BIASES, _TWO_NORMS),
        partial=True,
    ),
    "gptneox": Architecture(
        _GPT | _HALVES | {"mlp.activation": "gelu"},
        flags={"use_parallel_residual": {True: {"wiring.order": "parallel"}, False: {"wiring.order": "sequential"}}},
        required=("use_parallel_residual",),
        found=(_NORM_BIASES,),
        partial=True,
    ),
    "t5": Architecture(
        encoder_decoder.SETTINGS,
        encoder_decoder.TENSORS,
        numbers=encoder_decoder.NUMBERS,
        only=encoder_decoder.ONLY,
        required=encoder_decoder.REQUIRED,
        found=(
            Found("enc.blk.{layer}.ffn_gate.weight", encoder_decoder.GATED, {}),
            Found("enc.blk.1.attn_rel_b.weight", {"position.per_layer": True}, encoder_decoder.OWN_TABLES),
            Found("dec.blk.1.attn_rel_b.weight", {"position.per_layer": True}, encoder_decoder.OWN_TABLES),
        ),
        encoder=True,
    ),
    "bloom": Architecture(_GPT | _ALIBI | {"norm.embedding": True}, _EMBEDDING_NORM, found=(_NORM_BIASES,)),
    "falcon": Architecture(
        _GPT | _HALVES | {"mlp.activation": "gelu", "wiring.order": "shared"},
        only={"tensor_data_layout": ("jploski",)},
        found=(_NORM_BIASES, _SECOND_NORM),
    ),
    "mpt": Architecture(
        _GPT | _ALIBI | {"mlp.activation": "gelu"},
        numbers={"attention.clamp_kqv": "attention.clip"},
        only={"attention.max_alibi_bias": (8.0,)},
        required=("attention.max_alibi_bias",),
        found=(_NORM_BIASES,),
    ),
    "olmo": Architecture(
        _LAYER_NORM | _LLAMA | {"norm.weight": "none"}, numbers={"attention.clamp_kqv": "attention.clip"}
    ),
    "olmoe": Architecture(_SWIGLU | _HALVES | {"attention.qk_norm": "all"}, _QK_NORM, experts=Mixture(wide=True)),
    "olmo2": Architecture(
        _SWIGLU | _HALVES | {"norm.place": "output", "attention.qk_norm": "all"}, _QK_NORM | _POST_NORMS
    ),
    "command-r": Architecture(
        _LAYER_NORM | _LLAMA | {"wiring.order": "shared"},
        numbers={"logit_scale": "head.scale"},
        required=("logit_scale",),
    ),
    "cohere2": Architecture(
        _LAYER_NORM | _LLAMA | {"wiring.order": "shared"},
        numbers={"logit_scale": "head.scale"},
        required=("logit_scale",),
        window=WindowRule(period=4),
        plain_period=4,
    ),
    "granite": Architecture(
        _LLAMA,
        numbers=_MULTIPLIERS,
        stored={"logit_scale": "inverse"},
        required=("logit_scale",),
    ),
    # The same graph as Granite's.
    "minicpm": Architecture(
        _LLAMA, numbers=_MULTIPLIERS, stored={"logit_scale": "inverse"}, required=tuple(_MULTIPLIERS)
    ),
    "granitemoe": Architecture(
        _LLAMA,
        numbers=_MULTIPLIERS,
        stored={"logit_scale": "inverse"},
        required=("logit_scale",),
        experts=Mixture(_RENORMALIZED, wide=True),
    ),
    "internlm2": Architecture(_LLAMA),
    "xverse": Architecture(_LLAMA),
    "ernie4_5": Architecture(_LLAMA),
    "ernie4_5-moe": Architecture(_LLAMA, experts=Mixture(_RENORMALIZED)),
    "deepseek": Architecture(_LLAMA, experts=Mixture()),
    "gpt-oss": Architecture(
        _HALVES | {"mlp.activation": "gelu_sigmoid", "mlp.limit": 7.0, "mlp.plus_one": True, "attention.sinks": True},
        {"layers.{layer}.sinks": f"{_LAYER}.attn_sinks.weight", "layers.{layer}.mlp_norm": _POST_ATTENTION},
        window=WindowRule(period=2),
        yarn="exact",
        experts=Mixture({"experts.routing": "softmax_of_chosen"}),
    ),
    "deepseek2": Architecture(
        _LLAMA | {"attention.kind": "mla"},
        latent.TENSORS,
        found=(
            Found(f"{_LAYER}.attn_q.weight", {}, latent.WHOLE_QUERY),
            Found(f"{_LAYER}.attn_kv_b.weight", {}, latent.FUSED_UP),
        ),
        latent=True,
        experts=Mixture(),
    ),
    "dots1": Architecture(
        _SWIGLU | _HALVES | {"attention.qk_norm": "head"}, _QK_NORM, experts=Mixture({"experts.routing": "sigmoid"})
    ),
    "glm4moe": Architecture(
        _SWIGLU | _HALVES,
        {"layers.{layer}.mlp_norm": _POST_ATTENTION},
        found=(Found(f"{_LAYER}.attn_q_norm.weight", {"attention.qk_norm": "head"}, _QK_NORM),),
        partial=True,
        experts=Mixture({"experts.routing": "sigmoid"}),
    ),
    "hunyuan-dense": Architecture(_HUNYUAN, _QK_NORM),
    "hunyuan-moe": Architecture(_HUNYUAN, _QK_NORM, experts=Mixture(_RENORMALIZED)),
    "exaone4": Architecture(
        _SWIGLU | _HALVES | {"norm.place": "output", "attention.qk_norm": "head"},
        _QK_NORM | _POST_NORMS,
        window=WindowRule(period=4, size=0),
        plain_beside=True,
    ),
    "exaone-moe": Architecture(
        _SWIGLU | _HALVES | {"attention.qk_norm": "head"},
        _QK_NORM,
        window=WindowRule(period=4),
        plain_beside=True,
        experts=Mixture({"experts.routing": "sigmoid"}),
    ),
    "afmoe": Architecture(
        _SWIGLU | _HALVES | {"norm.place": "sandwich", "attention.qk_norm": "head", "attention.gate": "each"},
        _QK_NORM | _POST_NORMS | {"layers.{layer}.attention_gate": f"{_LAYER}.attn_gate.weight"},
        scaled_embedding=True,
        window=WindowRule(period=4, size=0),
        plain_period=4,
        experts=Mixture({"experts.routing": "sigmoid"}),
    ),
    "minimax-m2": Architecture(
        _SWIGLU | _HALVES | {"attention.qk_norm": "all"},
        _QK_NORM,
        partial=True,
        experts=Mixture({"experts.routing": "sigmoid"} | _RENORMALIZED),
    ),
    "dbrx": Architecture(
        _LAYER_NORM | _SWIGLU | _HALVES,
        {"layers.{layer}.mlp_norm": f"{_LAYER}.attn_output_norm.weight"},
        numbers={"attention.clamp_kqv": "attention.clip"},
        experts=Mixture(_RENORMALIZED, wide=True),
    ),
    # llama.cpp's graph has RMS norms and plain softmax routing; the model has what is here.
    "phimoe": Architecture(
        _LAYER_NORM | _SWIGLU | _HALVES,
        numbers={EPS["rms"]: "norm.eps"},
        found=(_NORM_BIASES,),
        window=WindowRule(period=None, size=0),
        experts=Mixture({"experts.routing": "sparse_mixer", "experts.tolerance": 0.01}, wide=True),
    ),
    "chatglm": Architecture(_LLAMA, _GATE_UP, partial=True),
    # 13B has ALiBi. The second generation normalizes its head, which files have as it is or already normalized.
    "baichuan": Architecture(
        _LLAMA,
        cases=(
            Case("sizes.layers", 40, _ALIBI),
            Case("sizes.vocab", 125696, tensors={"head": "output.weight | normalized"}),
        ),
    ),
    "apertus": Architecture(
        _HALVES | {"mlp.kind": "plain", "mlp.activation": "xielu", "attention.qk_norm": "head"},
        _QK_NORM
        | {f"layers.{{layer}}.xielu_{x}": f"xielu.alpha_{y}.{{layer}}" for x, y in (("above", "p"), ("below", "n"))},
        constants={"xielu.alpha_p": None, "xielu.alpha_n": None, "xielu.beta": 0.5, "xielu.eps": -1e-6},
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, experts=Mixture({"experts.routing": "sigmoid"} | _RENORMALIZED)),
    "jais2": Architecture(_GPT | _HALVES | {"mlp.activation": "relu_squared"}, found=(_NORM_BIASES,)),
    "pangu-embedded": Architecture(_SWIGLU | _HALVES),
    "arcee": Architecture(_PAIRS | {"mlp.kind": "plain", "mlp.activation": "relu_squared"}),
    "orion": Architecture(_LAYER_NORM | _SWIGLU | _HALVES, found=(_NORM_BIASES,)),
    "seed_oss": Architecture(_SWIGLU | _HALVES, {"layers.{layer}.mlp_norm": _POST_ATTENTION}),
    "exaone": Architecture(_SWIGLU | _HALVES),
    "smollm3": Architecture(_LLAMA, plain_period=4),
    "glm4": Architecture(_LLAMA | {"norm.place": "sandwich"}, _POST_NORMS | _GATE_UP, partial=True),
    "nemotron": Architecture(_GPT | _HALVES | {"mlp.activation": "relu_squared"}, found=(_NORM_BIASES,), partial=True),
}
