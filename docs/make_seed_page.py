"""Writes docs/seed_models.md: what llmc makes of the model specs that Inferflow ships (https://arxiv.org/abs/2401.08294).

    python docs/make_seed_page.py

tests/frontends/test_seed_page.py sees to it that every family and case named here exists and belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("seed_models.md")

FAMILIES = "tests/end_to_end/test_families.py"
GGUF = "tests/end_to_end/test_gguf_families.py"
ENCODERS = "tests/end_to_end/test_encoders.py"
LLAMA2C = "tests/frontends/test_llama2c.py"
TRANSLATORS = "tests/end_to_end/test_translators.py"


@dataclass(frozen=True)
class Row:
    """A shipped spec: its folder and file format, what derives ours, and the test's case that compiles such a model.

    `source` is a file of the repository. `test` "" stands for none.
    """

    shipped: str
    format: str
    source: str
    case: str
    test: str = FAMILIES


def _family(shipped: str, format: str, model_type: str, case: str) -> Row:
    return Row(shipped, format, f"frontends/families/{model_type}.toml", case)


ROWS = (
    _family("aquila_chat2_34b", "pickle", "aquila", "Aquila"),
    _family("baichuan2_13b_chat", "pickle", "baichuan", "Baichuan 2 13B"),
    _family("baichuan2_7b_chat", "pickle", "baichuan", "Baichuan 2 7B"),
    Row(
        "bert_base_multilingual_cased", "safetensors", "frontends/families/bert.toml", "test_older_names_of_norms",
        ENCODERS,
    ),
    _family("bloomz_3b", "pickle", "bloom", "BLOOM"),
    _family("bloomz_3b", "safetensors", "bloom", "BLOOM"),
    _family("chatglm2_6b", "pickle", "chatglm", "ChatGLM 2"),
    _family("deepseek_moe_16b_base", "safetensors", "deepseek", "DeepSeek MoE"),
    Row("facebook_m2m100_418m", "pickle", "frontends/families/m2m_100.toml", "M2M100, NLLB", TRANSLATORS),
    _family("falcon_40b_instruct", "pickle", "falcon", "Falcon 40B"),
    _family("falcon_7b_instruct", "pickle", "falcon", "Falcon 7B"),
    _family("fusellm_7b", "pickle", "llama", "Llama"),
    _family("gemma_2b_it", "safetensors", "gemma", "Gemma"),
    _family("internlm_chat_20b", "pickle", "internlm", "InternLM 20B, without biases"),
    Row("llama2.c 110M", "llama2.c", "frontends/llama2c/model.py", "test_it_computes_what_transformers_does", LLAMA2C),
    Row("llama2.c 15M", "llama2.c", "frontends/llama2c/model.py", "test_it_computes_what_transformers_does", LLAMA2C),
    _family("llama2_13b_chat_hf", "pickle", "llama", "Llama"),
    Row("llama2_7b_chat.gguf", "gguf", "frontends/gguf/architectures.py", "Llama", GGUF),
    _family("llama2_7b_chat_hf", "pickle", "llama", "Llama"),
    _family("llama2_7b_hf", "pickle", "llama", "Llama"),
    _family("minicpm_2b_dpo_bf16", "pickle", "minicpm", "MiniCPM"),
    _family("mistral_7b_instruct_v0.2", "pickle", "mistral", "Mistral 0.2, without windows"),
    _family("mistral_7b_instruct_v0.2", "safetensors", "mistral", "Mistral 0.2, without windows"),
    _family("mixtral_8x7b_instruct_v0.1", "safetensors", "mixtral", "Mixtral"),
    _family("open_llama_3b", "pickle", "llama", "Llama, heads of 100"),
    _family("opt_13b", "pickle", "opt", "OPT"),
    _family("opt_350m", "pickle", "opt", "OPT 350M"),
    _family("opt_iml_max_30b", "pickle", "opt", "OPT"),
    _family("orion_14b_chat", "pickle", "orion", "Orion"),
    _family("phi_2", "safetensors", "phi", "Phi"),
    _family("qwen1.5_0.5b_chat", "safetensors", "qwen2", "Qwen 2"),
    _family("qwen1.5_7b_chat", "safetensors", "qwen2", "Qwen 1.5"),
    _family("xverse_13b_chat", "pickle", "xverse", "XVERSE"),
    _family("yi_34b_chat", "safetensors", "llama", "Llama"),
    _family("yi_6b_200k", "safetensors", "llama", "Llama"),
)  # fmt: skip

OPENING = """\
# The models that Inferflow ships specs for

Inferflow (https://arxiv.org/abs/2401.08294) ships {count} specs, one for each model and file format. llmc derives a
spec of its own for {done} of them, from the model's `config.json` or the file itself, by what the third column says.
The last column is the test that compiles a tiny random model of the same structure and compares it with transformers:
a case of [test_families.py]({families}) where no other file is named.
"pickle" is `pytorch_model.bin`, which gives what the same weights in safetensors give
([test_torch_file.py](../tests/frontends/test_torch_file.py)).

None of these models was downloaded for this table: what it says is that their structure is understood, not how well
they answer. This page is written by docs/make_seed_page.py.

| Spec | File format | Spec of ours | Test |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    done = sum(bool(row.test) for row in ROWS)
    opening = OPENING.format(count=len(ROWS), done=done, families=f"../{FAMILIES}")
    return opening + "".join(
        f"| {row.shipped} | {row.format} | {_linked(row.source)} | {_test(row)} |\n" for row in ROWS
    )


def _linked(file: str) -> str:
    return f"[{Path(file).name}](../{file})" if file else ""


def _test(row: Row) -> str:
    where = f" in {_linked(row.test)}" if row.test not in ("", FAMILIES) else ""
    return row.case + where


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
