"""What an artifact says about itself."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Sequence
from typing import Any

from llmc.compiler.driver.recipe import VOCABULARY, Recipe, describe
from llmc.compiler.evaluate import StoredWeight
from llmc.compiler.kv_pages import PAGE, page_shape
from llmc.compiler.spec import ModelSpec, cached_heads, layer_groups, pool_layers, to_dict, weight_count
from llmc.compiler.spec.endless import endless_modes


def describe_model(
    model: Any, recipe: Recipe, equalized: bool, kv_dtype: str, stored: Sequence[StoredWeight], weights: dict[str, Any],
    variants: list[dict[str, Any]], functions: list[str], parts: Sequence[int] = (), activations: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """The manifest, less what `write_manifest` adds; `activations`: what was asked for."""
    spec: ModelSpec = model.spec
    kv_heads, head_dim = cached_heads(spec)
    body = [name for name in recipe if name not in VOCABULARY]
    source_weights = weight_count(spec)
    return {
        "name": spec.name,
        "task": _task(spec),
        "pooling": {"kind": spec.pooling.kind, "normalize": spec.pooling.normalize} if spec.pooling else None,
        "spec": to_dict(spec),
        "vocab": spec.sizes.vocab,
        "context": (spec.pooling.tokens if spec.pooling else 0) or spec.sizes.context,
        "kv": {
            "layers": pool_layers(spec), "kv_heads": kv_heads, "head_dim": head_dim, "page_tokens": PAGE,
            "dtype": kv_dtype, "page_shape": list(page_shape(kv_dtype, kv_heads, head_dim)),
            "groups": [{"layers": list(group.layers), "window": group.window} for group in layer_groups(spec)],
        },
        "functions": functions,
        "parts": list(parts),
        "invariance": "exact",  # every kernel sums in an order that the number of rows does not change
        "endless": list(endless_modes(spec)),
        "quantization": {
            "format": describe(recipe[name] for name in body or recipe),
            "bits_per_weight": round(8 * sum(w.nbytes for w in stored) / source_weights, 4),
            "formats": recipe,
            "equalized": equalized,
            "activations": activations,
            "tensors": dict(Counter(w.format for w in stored)),
            "source": dict(Counter(tensor.stored for tensor in model.tensors.values())),
        },
        "variants": variants,
        "runtime": "lib/libtvm_runtime.so",
        "weights": weights,
        "tokens": {
            "bos": spec.tokens.bos, "eos": list(spec.tokens.eos), "add_bos": spec.tokens.add_bos,
            "end": spec.tokens.end, "start": spec.tokens.start, "forced": list(spec.tokens.forced),
            "suppressed": list(spec.tokens.suppressed), "special": model.special_tokens,
        },
        "languages": dict(model.languages),
        "prefixes": dict(model.prefixes),
        "chat_template": "chat_template.jinja" if model.chat_template else None,
        "tokenizer": "tokenizer.json",
        "generation": model.generation,
        "compiler": {
            "llmc": importlib.metadata.version("llmc"), "tvm": importlib.metadata.version("apache-tvm"),
        },
    }  # fmt: skip


def _task(spec: ModelSpec) -> str:
    if spec.encoder:
        return "translate"
    if spec.pooling:
        return "embed"
    return "generate" if spec.attention.causal else "fill"
