"""ONNX files as containers of weights: a model of text compiled from them is the model that was exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import llmc
from llmc.compiler.driver import compile_model
from llmc.compiler.errors import LlmcError
from llmc.frontends.source import open_model

GERMAN = {
    "The house is wonderful.": "Das Haus ist wunderbar.",
    "I like cats and dogs.": None,
    "Where is the train station?": None,
    "She has been living in this small town for more than twenty years.": None,
}


@pytest.fixture(scope="module")
def translator(flan_t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_model(flan_t5, tmp_path_factory.mktemp("flan") / "flan.llmc", quant="f32").path


def _reference(folder: Path) -> T5ForConditionalGeneration:
    """transformers' model with the numbers that the files' codes stand for, read here by NumPy alone."""
    model = T5ForConditionalGeneration(T5Config(**json.loads((folder / "config.json").read_text())))
    model.lm_head = torch.nn.Linear(model.config.d_model, model.config.vocab_size, bias=False)  # its own
    values: dict[str, torch.Tensor] = {}
    for file, start, whole in (("encoder.onnx", "enc.", "encoder."), ("decoder.onnx", "m.", "")):
        graph = onnx.load(folder / file).graph
        arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        named = {name: name for name in arrays if not name.startswith("onnx::")}
        for node in graph.node:
            if node.op_type == "MatMulInteger" and node.input[1].startswith("onnx::"):
                base = node.input[1].removesuffix("_quantized")
                named[f"{base}_quantized"] = ".".join(node.name.strip("/").split("/")[:-1]) + ".weight_quantized"
        for name, title in named.items():
            value = arrays[name]
            if name.endswith("_quantized"):
                base = name.removesuffix("_quantized")
                codes, zero = value.astype(np.int32), arrays[f"{base}_zero_point"].astype(np.int32)
                value = (codes - zero).astype(np.float32) * arrays[f"{base}_scale"]
                value, title = (value.T if "::" in base else value), title.removesuffix("_quantized")
            elif name.endswith(("_scale", "_zero_point")):
                continue
            values[whole + title.removeprefix(start)] = torch.from_numpy(np.array(value))
    values.setdefault("decoder.embed_tokens.weight", values["shared.weight"])
    model.load_state_dict(values, strict=True)
    return model.eval()


@pytest.mark.model
def test_a_real_translator(flan_t5: Path, translator: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(flan_t5)
    reference = _reference(flan_t5)
    with llmc.load(translator) as model:
        done = model.translate(list(GERMAN), source_language="en", target_language="de", max_tokens=40)
    assert [text.text for text, wanted in zip(done, GERMAN.values(), strict=True) if wanted] == [
        wanted for wanted in GERMAN.values() if wanted
    ]
    for text, source in zip(done, GERMAN, strict=True):
        ids = tokenizer(f"translate English to German: {source}", return_tensors="pt").input_ids
        with torch.no_grad():
            (expected,) = reference.generate(ids, max_new_tokens=40, do_sample=False, num_beams=1)
        assert text.ids == expected.tolist()[1:], source


@pytest.mark.model
def test_a_file_with_a_spec(flan_t5: Path, tmp_path: Path) -> None:
    """One file, described by a spec that names its tensors: here both parts are needed, so that one is refused."""
    with open_model(flan_t5) as source:
        spec, names = source.spec, list(source.tensors)
    assert "encoder.layers.7.up" in names
    with pytest.raises(LlmcError, match="missing encoder"):
        open_model(flan_t5 / "decoder.onnx", spec)
