"""Models for the peers that read no GGUF file, made of one that llmc and llama.cpp read; see compare.py for the names.

    python tests/bench/peer_export.py folder MODEL.gguf FOLDER            a transformers folder of a Llama, dequantized
    PEER/bin/python tests/bench/peer_export.py openvino FOLDER OUTPUT --bits 4
    PEER/bin/python tests/bench/peer_export.py onnxruntime FOLDER OUTPUT
    PEER/bin/python tests/bench/peer_export.py ctranslate2 FOLDER OUTPUT

The interpreter of a peer needs its exporter: optimum-intel with nncf; onnxruntime-genai with torch, transformers,
onnx-ir; ctranslate2 with torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

GROUP = 64  # weights that share a scale in OpenVINO's 4 bits: 4.25 + bits of zero points, near llmc's


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["folder", "openvino", "onnxruntime", "ctranslate2"])
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4, help="of OpenVINO's weights")
    options = parser.parse_args()
    if options.what == "folder":
        transformers_folder(options.source, options.output)
    else:
        subprocess.run(_command(options), check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def _command(options: argparse.Namespace) -> list[str]:
    source, output = str(options.source), str(options.output)
    if options.what == "openvino":
        width = f"int{options.bits}"
        command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", source, "--task",
                   "text-generation-with-past", "--weight-format", width]  # fmt: skip
        return [sys.executable, *command, *(["--group-size", str(GROUP)] if options.bits == 4 else []), output]
    if options.what == "onnxruntime":
        command = ["-m", "onnxruntime_genai.models.builder", "-m", source, "-i", source, "-p", "int4", "-e", "cpu"]
        return [sys.executable, *command, "-c", f"{output}-cache", "-o", output]
    tool = "import sys; from ctranslate2.converters.transformers import main; sys.exit(main())"
    return [sys.executable, "-c", tool, "--model", source, "--output_dir", output, "--quantization", "int8", "--force"]


def transformers_folder(source: Path, output: Path) -> None:
    """Write the Llama of a GGUF file as transformers would have saved it: bfloat16, config.json, its tokenizer."""
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(str(source))
    found = {name: reader.fields[f"llama.{name}"].contents() for name in _SIZES.values()}
    heads = {"q_proj": found["attention.head_count"], "k_proj": found["attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = name.split(".")[-2]
        if part in heads:  # llama.cpp turns neighbours, transformers halves of a head
            pairs = values.reshape(heads[part], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {key: found[name] for key, name in _SIZES.items()}
    config |= {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "vocab_size": len(weights["model.embed_tokens.weight"]), "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(output)


_SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip

_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    pieces = name.split(".")
    if pieces[0] == "blk":
        return f"model.layers.{pieces[1]}.{_NAMES[pieces[2]]}.{pieces[3]}"
    return f"{_NAMES[pieces[0]]}.{pieces[1]}"


if __name__ == "__main__":
    main()
