"""Writes docs/families.md, the families that llmc reads from folders and GGUF files, from what their tests run over.

    python docs/make_families_page.py

The rows are the cases of family_cases.py, encoder_cases.py, translator_cases.py and gguf_cases.py in tests/end_to_end,
all of which have to pass.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from llmc.frontends.gguf.encoders import REFUSED
from llmc.frontends.hf.families import load_family

PAGE = Path(__file__).with_name("families.md")
_TESTS = Path(__file__).parents[1] / "tests" / "end_to_end"

OPENING = """\
# Families

`llmc compile FOLDER` derives the spec from `config.json` for these values of `model_type`. Of each variant a tiny
random model of transformers is compiled and compared: logits within 1e-4, 32 greedy tokens, prompts fed at once, by
seven tokens, by one and in a batch (tests/end_to_end/test_families.py). A family that transformers has not is compared
with one that computes the same. This page is written by docs/make_families_page.py from the list of that test.

A family is a file, frontends/families/MODEL_TYPE.toml: what the keys of its config.json mean, and what it calls its
tensors. What the keys of such a file are, frontends/hf/families.py says. A model of a family that is not here compiles
with a spec of its own, if its blocks are those of [the spec](spec.md).

A folder's weights may be safetensors or PyTorch's pickles, in shards or not, for every family, and ONNX files beside a
config.json (tests/end_to_end/test_onnx_weights.py: T5). The column GGUF has the architecture that such a file names,
where a model of the family was tested from one.

| Family | `model_type` | GGUF | Tested variants |
| --- | --- | --- | --- |
"""

ENCODERS = """
## Encoders

Vectors of texts (`llmc embed`) and words behind masks (`llmc fill`) within 1e-4 of what transformers gives
(tests/end_to_end/test_encoders.py); sentence-transformers folders bring their pooling along.

| Family | `model_type` | GGUF | Tested variants |
| --- | --- | --- | --- |
"""

TRANSLATORS = """
## Encoder-decoders

What the encoder gives and the logits of an answer within 1e-4 of what transformers gives, and 32 greedy tokens, of
sources alone and in a batch (tests/end_to_end/test_translators.py). `llmc translate` is for them: languages are chosen
by the tokens that M2M100, NLLB and mBART-50 have for them, or by the words that T5 wants to read before a text.

| Family | `model_type` | GGUF | Tested variants |
| --- | --- | --- | --- |
"""

QUANTIZED = """
## Folders that are quantized

What `quantization_config` of config.json (MLX: `quantization`) says of the weights. Codes are kept where a format has
as many bits, the same kind of zero, and blocks that groups and rows are made of: rows and columns of a scale are a
multiple of 32, of q6, q5, q4_b64, q4_0_b64, int4_b64 and nf4 of 64, of nvfp4 of 16.
Scales become float16; where it cannot hold them the folder is
refused, and `--quant` quantizes it again. All else is read as floats and becomes what is asked for (8-bit).
What is said of activations is left out: llmc rounds them in its own way, or not. What is not here is refused by name.

| Folder | What is read | Kept as | Read as floats |
| --- | --- | --- | --- |
| GPTQ | 2, 3, 4, 8 bits; `gptq` and `gptq_v2`; groups in order | 4 bits: int4_b32, int4_b64, with `sym` q4_0, \
q4_0_b64; 2, 3, 8 bits with `sym`: q2, q3, q8 | 2, 3, 8 bits without `sym` |
| AWQ | 4 bits, `gemm` | int4_b32, int4_b64 | |
| MLX | `affine` of 2, 3, 4, 5, 6, 8 bits; `mxfp4`, `nvfp4`, `mxfp8`; each layer its own; experts in stacks | q2, q3, \
q4 or q4_b64, q5_1 or q5, q6, q8_b32; mxfp4, nvfp4 | `mxfp8`; 6 bits in groups of 32 |
| compressed-tensors | `pack-quantized` of 1 to 8 bits; `int-quantized`; `float-quantized` by tensor, row or block; \
`mxfp4-pack-quantized`, `nvfp4-pack-quantized` | symmetric: q2, q3, q4_0, q4_0_b64, q5_0, q6, q8; 4 bits with zero \
points: int4_b32, int4_b64; mxfp4, nvfp4 | 1 and 7 bits; zero points of other than 4 bits; 8-bit floats |
| Model Optimizer | `quant_algo`, in config.json or hf_quant_config.json: NVFP4, W4A16_NVFP4, W4A8_MXFP4_FP8, W8A16, \
FP8 (by tensor, channel, block), MXFP8, and mixtures | nvfp4, mxfp4; W8A16: q8 | FP8, MXFP8 |
| bitsandbytes | NF4 and FP4, with nested scales or not; 8 bits | NF4: nf4, each value within 0.4 % of its \
block's greatest (0.33 % of its size in the mean); 8 bits: q8 | FP4; NF4 where blocks do not fill rows |
| FP8 (DeepSeek V3) | E4M3 in squares of 128 | | all |
| MXFP4 (gpt-oss) | experts | mxfp4 | |
"""

GGUF = """
## GGUF files

`llmc compile FILE.gguf` derives the spec from the file's metadata for these values of `general.architecture`. Of each
variant a tiny random model of transformers is written as llama.cpp's converter writes it, compiled and compared in the
same way (tests/end_to_end/test_gguf_families.py; vectors in test_gguf_encoders.py, encoder-decoders in
test_gguf_translators.py beside it). An architecture is a row in frontends/gguf/architectures.py.

| `general.architecture` | Tested variants |
| --- | --- |
"""


OTHERS = """
## Not compiled

Every other `model_type` that transformers has a causal language model for (the test of families checks that the list
is complete).

| `model_type` | Why: its model |
| --- | --- |
"""


def page() -> str:
    """The whole page."""
    encoders = [(variant, kind) for variant, (kind, _) in _module("encoder_cases").ENCODERS.items()]
    translators = [(variant, kind) for variant, (kind, _) in _module("translator_cases").TRANSLATORS.items()]
    tables = [(OPENING, _variants()), (ENCODERS, encoders), (TRANSLATORS, translators)]
    tested = "".join(opening + _families(cases) for opening, cases in tables)
    return tested + QUANTIZED + GGUF + _architectures() + _refused() + OTHERS + _others()


def _families(cases: list[tuple[str, str]]) -> str:
    """Rows of a table of (variant, model_type)."""
    variants = _grouped(cases)
    files = _gguf_files()
    rows = [
        f"| {load_family(kind).title} | `{kind}` | {files.get(kind, '')} | {'; '.join(variants[kind])} |"
        for kind in variants
    ]
    return "\n".join(sorted(rows, key=str.lower)) + "\n"


def _gguf_files() -> dict[str, str]:
    """model_type -> the architectures that GGUF files of such models name."""
    cases, remote = _module("gguf_cases"), {case.model_type for case in _module("family_cases").REMOTE.values()}
    written = (cases.CASES | cases.TRANSLATORS).values()
    # A family that transformers has not is tested by a model of another that computes the same.
    pairs = [(kind if kind in remote else model_type, kind) for kind, model_type, _ in written]
    pairs += [(cases.ENCODER_TYPES[kind], kind) for kind in cases.ENCODERS.values()]
    return {
        model_type: ", ".join(f"`{kind}`" for kind in sorted(set(kinds)))
        for model_type, kinds in _grouped([(kind, model_type) for model_type, kind in pairs]).items()
    }


def _others() -> str:
    """Rows of model types by reason."""
    reasons: dict[str, list[str]] = {}
    for model_type, reason in importlib.import_module("family_lists.others").OTHERS.items():
        reasons.setdefault(reason, []).append(f"`{model_type}`")
    return "".join(f"| {', '.join(types)} | {reason} |\n" for reason, types in reasons.items())


def _architectures() -> str:
    cases = _module("gguf_cases")
    written = [(variant, kind) for variant, (kind, _, _) in (cases.CASES | cases.TRANSLATORS).items()]
    variants = _grouped([*written, *cases.ENCODERS.items()])
    return "".join(f"| `{kind}` | {'; '.join(variants[kind])} |\n" for kind in sorted(variants))


def _refused() -> str:
    """The architectures that are refused by name."""
    reasons = [f"`{kind}`: {reason}" for kind, reason in REFUSED.items()]
    return f"\nRefused, for want of a block: {'; '.join(reasons)}.\n"


def _grouped(variants: list[tuple[str, str]]) -> dict[str, list[str]]:
    """(variant, kind) -> variants by kind."""
    groups: dict[str, list[str]] = {}
    for variant, kind in variants:
        groups.setdefault(kind, []).append(variant)
    return groups


def _variants() -> list[tuple[str, str]]:
    """(variant, model_type) of the cases of test_families.py."""
    module = _module("family_cases")
    remote = [(variant, case.model_type) for variant, case in module.REMOTE.items()]
    return [(variant, model_type) for variant, (model_type, _) in module.CASES.items()] + remote


def _module(name: str) -> Any:
    """A list of cases beside the tests."""
    spec = importlib.util.spec_from_file_location(name, _TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # which a dataclass looks itself up in
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
