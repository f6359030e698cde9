"""Models compiled for CUDA, on machines without a GPU: what the artifact holds, and that its step means the same.

No step of it has run on a GPU here. Its graph runs by the ops' NumPy meanings, and its kernels by an interpreter of
their threads (tests/cuda/cuda_threads.py); both must give the tokens of the CPU's artifact.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.compile import planned_step
from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import KINDS
from llmc.frontends.source import open_model
from llmc.passes.fuse_rope import fuse_rope
from llmc.passes.fuse_rounding import fuse_rounding
from llmc.passes.round_activations import round_activations
from llmc.runtime import ArtifactError
from llmc.targets.cuda.lower import lower
from llmc.targets.target import get

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "cuda"), str(Path(__file__).parent)]
import cuda_threads
from encoder_cases import ENCODERS
from graph_walk import Walk
from latent_cases import LATENT
from tiny_translator import save_tokenizer, save_translator
from translator_cases import TRANSLATORS, VOCAB

TARGET = "cuda:sm_80"
need_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH: CUDA code cannot be compiled")
_WINDOWS = {
    "sliding_window": 17, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16,
    "num_key_value_heads": 1,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True, "num_hidden_layers": 1,
}  # fmt: skip
_LATENT = {
    **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 0, "num_hidden_layers": 1,
}  # fmt: skip
# model_type -> its config, the format of weights, that of pages. The second norms heads of q and k, the third has
# windows, other norms and one kv head, the fourth layer norm, biases and an MLP without a gate, the fifth a latent and
# experts in groups, the sixth experts of which one is shared, the seventh a bias by distance, the last short
# convolutions and rotated weights, also of the vocabulary.
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": ({}, "q4", "f32"),
    "qwen3": ({}, "c3h", "f32"),
    "gemma3_text": (_WINDOWS, "bf16", "bf16"),
    "starcoder2": ({}, "f32", "q4"),
    "deepseek_v3": (_LATENT, "f32", "f32"),
    "qwen2_moe": (_EXPERTS, "f32", "q8"),
    "bloom": ({}, "f32", "f32"),
    "lfm2": ({"num_hidden_layers": 3, "full_attn_idxs": [1], "num_key_value_heads": 1}, "r8", "bf16"),
}
# Of these kernels are run too, by an interpreter, which takes long; tests/end_to_end/test_cuda_steps.py runs others.
INTERPRETED = ["llama", "gemma3_text", "deepseek_v3", "lfm2"]
# Blocks that these have, others have too, here or in test_cuda_steps.py.
THOROUGH = ["llama", "lfm2", "gemma3_text", "qwen3", "T5", "M2M100, NLLB", "ModernBERT"]
# Encoder-decoders of test_translators.py: by distance with biases that are learned, and by sines.
SOURCES = ["T5", "M2M100, NLLB"]
# Of the greatest logit: products of floats in two parts of bfloat16; a code is another one where a sum is.
EXACT, ROUNDED = 1e-4, 2e-2
PROMPT, ANSWER = [5, 77, 130, 9, 250], 2  # a step of five rows, then one of one


def step_of(source: Path, artifact: Path) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
    """The module of packed ops that the artifact was made of, its weights in order, and its manifest."""
    manifest = json.loads((artifact / "manifest.json").read_text())
    with open_model(source) as model:
        recipe = manifest["quantization"]["formats"]
        _, step = planned_step(model.spec, recipe, manifest["kv"]["dtype"], None, True, lambda *_: None)
    stored = load_file(artifact / manifest["weights"]["file"])
    return step, [stored[name] for name in manifest["weights"]["order"]], manifest


def check_ways(source: Path, artifact: Path, ask: Callable[[Any], Any], interpreted: bool = True) -> None:
    """What `ask(model)` gives is the same when the CPU's functions are replaced, by meanings and by CUDA's kernels.

    What the replaced ones give is compared with the CPU's, call by call. interpreted: by kernels too.
    """
    step, weights, manifest = step_of(source, artifact)
    (target,) = get(TARGET)
    with llmc.load(artifact, threads=1, cache_tokens=64) as model:
        wanted = ask(model)
        compiled = {"step": model.runner.step_function, "encode": model.runner.encode_function}
        most = EXACT if manifest["kv"]["dtype"] == "f32" else ROUNDED
        ways = {"meanings": (step, most)}
        if interpreted:
            ways["kernels"] = lower(fuse_rounding(fuse_rope(step)), target), most
        if "q4" in manifest["quantization"]["formats"].values():
            ways["rounded"] = lower(fuse_rounding(fuse_rope(round_activations(step))), target), ROUNDED
        for way, (module, off) in ways.items():

            def both(name: str, walk: Walk, off: float, kv: list[np.ndarray], *index: np.ndarray) -> Any:
                given, *others = compiled[name](*index)
                mine, *best = walk(*index, kv, weights)[: 1 + len(others)]
                np.testing.assert_allclose(mine, given, rtol=0, atol=float(np.abs(given).max()) * off)
                return [mine, *best]

            kv = pages(manifest)
            for name, function in compiled.items():
                if function is not None:
                    replaced = partial(both, name, Walk(module, name, cuda_threads.run), off, kv)
                    setattr(model.runner, f"{name}_function", replaced)
            found = ask(model)
            if isinstance(wanted, np.ndarray):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=float(np.abs(wanted).max()) * most)
            else:
                assert found == wanted, way


def answer(model: Any) -> Any:
    """The tokens that follow the prompt."""
    return model.generate(PROMPT, max_tokens=ANSWER, ignore_eos=True).ids


@pytest.mark.thorough_if(case=lambda model_type: model_type in THOROUGH)
@pytest.mark.parametrize("model_type", MODELS)
def test_kernels_and_meanings_give_the_tokens_of_a_cpu(
    model_type: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    config, quant, kv_dtype = MODELS[model_type]
    source = tiny_model(model_type, **config)
    compile_model(source, tmp_path / "cpu.llmc", quant=quant, kv=kv_dtype, activations="f32")
    check_ways(source, tmp_path / "cpu.llmc", answer, model_type in INTERPRETED)


@pytest.mark.thorough_if(case=lambda case: case in THOROUGH)
@pytest.mark.parametrize("case", SOURCES)
def test_an_encoder_and_its_decoder(case: str, tmp_path: Path) -> None:
    """The source is read by rows that see each other; the answer's rows attend to it."""
    model_type, config = TRANSLATORS[case]
    save_translator(tmp_path, model_type, config, seed=len(case))
    compile_model(tmp_path, tmp_path / "cpu.llmc", quant="f32", activations="f32")
    check_ways(tmp_path, tmp_path / "cpu.llmc", answer)


@pytest.mark.thorough_if(case=lambda case: case in THOROUGH)
@pytest.mark.parametrize("case", ["BERT", "ModernBERT"])
def test_an_encoder_alone(case: str, tmp_path: Path) -> None:
    """The vector of a text, whose rows see each other, in a window too."""
    save_encoder(tmp_path, case)
    compile_model(tmp_path, tmp_path / "cpu.llmc", quant="f32", activations="f32")
    check_ways(tmp_path, tmp_path / "cpu.llmc", lambda model: model.embed(["a text", "one more"]))


@need_nvcc
@pytest.mark.thorough
def test_encoders_are_compiled(tmp_path: Path) -> None:
    model_type, config = TRANSLATORS["T5"]
    save_translator(tmp_path, model_type, config, seed=1)
    made = compile_model(tmp_path, tmp_path / "cuda.llmc", quant="f32", target=TARGET).path
    llmc.runtime.verify(str(made))
    assert json.loads((made / "manifest.json").read_text())["functions"] == ["encode", "step"]


def save_encoder(folder: Path, case: str) -> None:
    """A random encoder, as transformers saves it, and a tokenizer of bytes."""
    import torch
    from transformers import AutoConfig, AutoModel

    model_type, config = ENCODERS[case]
    torch.manual_seed(len(case))
    AutoModel.from_config(AutoConfig.for_model(model_type, vocab_size=VOCAB, **config)).save_pretrained(folder)
    save_tokenizer(folder, VOCAB, ())


def pages(manifest: dict[str, Any]) -> list[np.ndarray]:
    """A cache of four pages for every layer, full of what is no number."""
    kv = manifest["kv"]
    kind = KINDS[kv["dtype"]]
    value = {"f": np.nan, "u": 0x7FC0 if kind.dtype == np.uint16 else 0xFF}[kind.dtype.kind]
    return [np.full((5, *kv["page_shape"]), value, kind.dtype) for _ in range(kv["layers"])]


@need_nvcc
def test_an_artifact_for_cuda(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    """It holds a cubin and TVM's runtime for it, the bytes of the CPU's weights, and is the same every time."""
    source = tiny_llama()
    first, again = (compile_model(source, tmp_path / f"{i}.llmc", quant="bf16", target=TARGET).path for i in "ab")
    cpu = compile_model(source, tmp_path / "cpu.llmc", quant="bf16", activations="f32").path
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (first, again)]
    assert manifests[0] == manifests[1]
    (variant,) = manifests[0]["variants"]
    assert variant["device"] == {"kind": "cuda", "arch": "sm_80", "runtime": "lib/libtvm_runtime_cuda.so"}
    assert set(manifests[0]["files"]) >= {"lib/cuda-sm_80.so", "lib/libtvm_runtime_cuda.so", "lib/libtvm_runtime.so"}
    library = (first / variant["file"]).read_bytes()
    assert b"llmc cubin base64 f0VMRg" in library  # of "\x7fELF"
    assert b"__global__" not in library  # no source, which would want a compiler at every load
    assert (first / "weights.safetensors").read_bytes() == (cpu / "weights.safetensors").read_bytes()
    llmc.runtime.verify(str(first))
    assert llmc.runtime.inspect(str(first))["machine"]["variant"] is None
    with pytest.raises(ArtifactError, match=r"only compiled for GPUs: cuda-sm_80 needs .+; for CPUs, compile it with"):
        llmc.load(first)


def test_what_cuda_cannot_do_yet_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, target: str = TARGET, **options: Any) -> None:
        with pytest.raises(LlmcError, match=match):
            compile_model(tmp_path / options.pop("source", "none"), tmp_path / "a.llmc", target=target, **options)

    refused("unknown target 'cuda:sm_70'; llmc knows: .*cuda:sm_80, cuda:sm_86, cuda:sm_89, cuda:sm_90", "cuda:sm_70")
    refused("--activations i8: kernels of cuda-sm_80", activations="i8")
    refused("--tuned: not for cuda-sm_80 so far", tuned=tmp_path / "db.json")
    refused("a graph: not for cuda-sm_80 so far", source="model.onnx")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("is needed to (link|compile)")
