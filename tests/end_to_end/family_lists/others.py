"""Why llmc does not compile each of the other causal language models of transformers: `model_type` -> reason."""

from __future__ import annotations

# Reason -> model types.
_REASONS = {
    "has layers with a state in place of a cache of tokens": (
        "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lara_mini mamba mamba2 minimax "
        "nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text "
        "recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    "has convolutions": "inkling2_loop_text inkling2_text inkling_text zaya",
    "looks at tokens that an index of its own picks": (
        "axk2 deepseek_v4 dots3_note dots3_note_text hy_v4 minimax_m3_vl_text"
    ),
    "is an encoder, which transformers can run as a decoder": (
        "bert-generation big_bird data2vec-text electra ernie megatron-bert rembert roberta-prelayernorm roc_bert "
        "roformer xlm xlm-roberta-xl xmod"
    ),
    "is the decoder of a model with an encoder, taken by itself": (
        "bigbird_pegasus blenderbot-small moshi musicgen musicgen_melody prophetnet trocr whisper"
    ),
    "reads images or sound too; its text model may have a `model_type` of its own": (
        "cohere_compass_text emu3 fuyu gemma3 gemma4 gemma4_unified git got_ocr2 llama4 mllama moss_transcribe_diarize "
        "phi4_multimodal"
    ),
    "is of known blocks, but has no file yet": "aria_text cohere2_moe flint",
    "has inputs for every layer, and layers of several head sizes": (
        "gemma3n gemma3n_text gemma4_text gemma4_unified_text"
    ),
    "reads the cache of another model": "gemma4_assistant gemma4_unified_assistant",
    "is GPT-2 by the `model_type` of its files": "gpt-sw3",
    "has a bias in its last layer only": "gpt_neox_japanese",
    "norms inside attention and the MLP, and rounds activations": "bitnet",
    "scales queries by their place and sums by their depth": "beam",
    "reads patches of bytes through models of their own": "blt",
    "tells places by segments of the text": "cpmant",
    "attends twice and takes the difference": "diffllama",
    "hides tokens by what they say": "doge",
    "runs its layers several times": "dory hrm_text",
    "has experts in attention": "jetmoe",
    "has layers of several numbers of heads": "laguna mimo_v2_flash",
    "attends to chunks": "llama4_text",
    "has two attentions and experts that do nothing in a layer": "longcat_flash",
    "attends by hashes": "reformer",
    "attends in two streams": "xlnet",
}

OTHERS = {model_type: reason for reason, types in _REASONS.items() for model_type in types.split()}
