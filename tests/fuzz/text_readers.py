"""Readers of metadata and of what people write: JSON, config.json, GGUF keys, specs, sources, manifests, folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from mutate import VALUES, as_json, change_bytes, change_tree
from reader import Reader, read_tensors

from llmc.compiler.artifact import FORMAT
from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import ModelSpec, expand, from_toml, tensor_shapes, to_toml, weight_count
from llmc.compiler.spec.model_spec import example
from llmc.compiler.spec.sources import expand_sources, layout, parse
from llmc.frontends.binding import bind
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.files.strict_json import read_json, read_list
from llmc.frontends.gguf import architectures as rules
from llmc.frontends.gguf.experts import guess_ahead
from llmc.frontends.gguf.spec import derive_spec as derive_gguf
from llmc.frontends.hf.config import derive_spec as derive_hf
from llmc.frontends.hf.families import known_families
from llmc.frontends.hf.folder import read_folder
from llmc.frontends.tensor import Tensor
from llmc.runtime.errors import LlmcError as RuntimeLlmcError
from llmc.runtime.loading.manifest import read_manifest
from llmc.runtime.loading.schema import canonical_json

_LAYERS = 3  # of configs that are changed


def _look(spec: ModelSpec) -> None:
    """What a compile asks of a spec before it opens weights."""
    assert weight_count(spec) > 0
    assert set(tensor_shapes(spec)) <= set(expand(spec))


def _json(_: Path) -> Reader:
    trees: list[Any] = [
        {"a": 1, "b": [1.5, -2e-3, None, True], "c": {"d": "é\n\u2028", "e": {}}},
        json.loads(json.dumps({"model": {"vocab": {"a": 0, "<s>": 1}, "merges": [["a", "b"]]}})),
    ]
    samples = [json.dumps(tree).encode() for tree in trees]
    samples += [json.dumps(tree, ensure_ascii=False, indent=1).encode() for tree in trees]

    def make(random: Random) -> bytes:
        if random.random() < 0.05:
            return random.choice((b"[", b'{"a":', b"[{", b'{"a":[')) * random.choice((10, 500, 5000, 200000))
        if random.random() < 0.6:
            return change_bytes(random, samples)
        return as_json(random, change_tree(random, random.choice(trees)))

    def read(data: bytes) -> None:
        table = read_json(data, "x.json")
        assert read_json(json.dumps(table).encode(), "again") == table
        read_list(b"[" + data + b"]", "x.json")

    return Reader(samples, make, read)


def _configs() -> list[dict[str, Any]]:
    """A config of every family that transformers has, as it saves it, of few layers; those of them that llmc reads."""
    from transformers import CONFIG_MAPPING

    found = []
    for kind in known_families():
        if kind in CONFIG_MAPPING:
            config = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
            few = {key: _LAYERS for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in config}
            lists = {key: value[:_LAYERS] for key, value in config.items() if isinstance(value, list)}
            found.append(config | lists | few | {"model_type": kind})
    return [config for config in found if _derives(config)]


def _derives(config: dict[str, Any]) -> bool:
    try:
        _look(derive_hf(config, {}, "x", None))
    except LlmcError:
        return False
    return True


def _quantized() -> list[dict[str, Any]]:
    """What config.json says of weights that are quantized already."""
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    ints = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    squares = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    groups = {"a": {"weights": ints, "targets": ["Linear"]}, "b": {"format": "float-quantized", "weights": squares}}
    compressed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    bnb = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    mlx = {"bits": 4, "group_size": 64, "lm_head": False, "a.b": {"bits": 6, "group_size": 32, "mode": "affine"}}
    tables = [{"quantization_config": table} for table in (packed, compressed, bnb)]
    return [*tables, {"quantization": mlx, "quantization_config": mlx}]


def _config(_: Path) -> Reader:
    configs = _configs()
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32}  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    configs += [config | {"rope_parameters": rope} for config in configs[:8] for rope in (scaled, yarn)]
    configs += [config | keys for config in configs[:4] for keys in _quantized()]

    def read(config: dict[str, Any]) -> None:
        _look(derive_hf(config, {}, "x", None))

    samples = [config for config in configs if _derives(config)]
    assert len(samples) > 40
    return Reader(samples, lambda random: change_tree(random, random.choice(samples)), read)


def _metadata(kind: str) -> dict[str, Any]:
    """Every key that an architecture's files may have, with values that are in order together."""
    rule = rules.ARCHITECTURES[kind]
    own: dict[str, Any] = {
        "context_length": 128, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 1e4, "logit_scale": 0.5,
    }  # fmt: skip
    own |= {key: values[0] for key, values in {**rules.ONLY, **rule.only}.items()}
    own |= {key: next(iter(values)) for key, values in rule.flags.items()}
    own |= {rules.WINDOW_SIZE: 16} if rule.window else {}
    mixed = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_gating_func": 2}
    own |= mixed if rule.experts else {}
    paired = {"attention.relative_buckets_count": 8, "decoder_start_token_id": 0, "decoder_block_count": 3}
    own |= paired if rule.encoder else {}
    known = {*rules.NUMBERS, *rules.EPS.values(), *rule.numbers, *rules.ONLY, *rule.only, *rule.flags}
    known |= ({rules.WINDOW_SIZE} if rule.window else set()) | (set(mixed) if rule.experts else set())
    known |= set(paired) if rule.encoder else set()
    unused = set(rules.EPS.values()) - {rules.EPS[rule.settings.get("norm.kind", "rms")]}
    table = {f"{kind}.{key}": value for key, value in own.items() if key in known - unused}
    tokens = {"model": "gpt2", "pre": "gpt-2", "tokens": [str(i) for i in range(40)], "bos_token_id": 1}
    return {"general.architecture": kind, **table, **{f"tokenizer.ggml.{key}": value for key, value in tokens.items()}}


def _gguf_keys(_: Path) -> Reader:
    routers = {f"blk.{layer}.ffn_gate_inp.weight": (4, 64) for layer in range(2)}
    more = [found.tensor.replace("{layer}", "0") for found in rules.FOUND]
    more += [f"blk.1.{name}" for name in ("ffn_up_shexp.weight", "exp_probs_b.bias", "ffn_gate_up_exps.weight")]
    samples = [(_metadata(kind), routers) for kind in rules.ARCHITECTURES]

    def make(random: Random) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        metadata = change_tree(random, random.choice(samples)[0])
        names = {name: random.choice(((64, 64), (4,), (1, 1))) for name in more if random.random() < 0.1}
        return metadata, names if random.random() < 0.1 else routers | names

    def read(case: tuple[dict[str, Any], dict[str, tuple[int, ...]]]) -> None:
        guess_ahead(*case)
        _look(derive_gguf(*case, "x"))

    kept = []
    for case in samples:
        with contextlib.suppress(LlmcError):
            read(case)
            kept.append(case)
    assert len(kept) > 15
    return Reader(kept, make, read)


def _spec(_: Path) -> Reader:
    specs = [example(), *(derive_hf(config, {}, "x", None) for config in _configs())]
    texts = [to_toml(spec) for spec in specs]
    lines = sorted({line for text in texts for line in text.splitlines()})
    same = {key: [line for line in lines if line.startswith(f"{key} = ")] for key in {x.split(" = ")[0] for x in lines}}

    def make(random: Random) -> str:
        rows = random.choice(texts).splitlines()
        for _ in range(random.choice((1, 1, 2, 3))):
            at = random.randrange(len(rows))
            key, equals, _ = rows[at].partition(" = ")
            change = random.random()
            if change < 0.4 and equals:
                rows[at] = random.choice(same[key]) if key in same else rows[at]
            elif change < 0.6 and equals:
                value = random.choice((*VALUES, random.choice(lines)))
                rows[at] = f"{key} = {json.dumps(value, ensure_ascii=random.random() < 0.5)}"
            elif change < 0.75:
                rows[at] = random.choice(lines)
            elif change < 0.8:
                rows.insert(at, random.choice(lines))
            elif change < 0.9:
                del rows[at]
                rows = rows or [""]
            else:
                rows[at] = random.choice(
                    ("[" * 3000, "a = " + "[" * 5000, "[a.b.c]", "a.b = 1", 'x = """', "'" * 9, "\x00")
                )
        text = "\n".join(rows)
        if random.random() < 0.1:
            return change_bytes(random, [text.encode("utf-8", "surrogatepass")]).decode("utf-8", "replace")
        return text

    def read(text: str) -> None:
        spec = from_toml(text)
        _look(spec)
        assert from_toml(to_toml(spec)) == spec

    return Reader(texts, make, read)


_STEPS = (
    "transposed", "skip 1", "skip 2", "row 0 of 2", "row 1 of 2", "flat", "normalized", "q k v", "q k v by group",
    "k q v by 2", "gate up", "gate up by expert", "up gate", "q k", "skip 0", "skip 99999999999", "by", "| |",
    "row 2 of 2",
    "row 0 of 999999999", "q k v by 0", "q q", "transposed transposed", "x", "\x00", "", "q k v by 3",
)  # fmt: skip
_FUSED = {
    ("q", "k", "v"): ("q k v", "k q v", "q k v by group", "q k v by 2", "v q k by 4", "q k"),
    ("gate", "up"): ("gate up", "up gate", "gate up by 4", "gate up by group", "gate up by expert"),
}
_GROUPS = list(_FUSED)
_NAMES = ("w.{layer}", "w", "experts.{layer}", "e.{layer}.{expert}", "{expert}", "{layer}{layer}", "", "v", "t.{layer}")


def _sources(folder: Path) -> Reader:
    """The grammar of a spec's tensors, and the views that it makes of the tensors of a file."""
    path = folder / "x.bin"
    path.write_bytes(np.arange(1 << 14, dtype=np.float32).tobytes())
    file = open_mapped(path, 1)
    base = example()

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        return Tensor(name, shape, "F32", 0, 4 * math.prod(shape), file)

    whole = {ours: tensor(theirs, tensor_shapes(base)[ours]) for ours, theirs in expand(base).items()}
    sample = (base.tensors, {t.name: t.shape for t in whole.values()})

    def make(random: Random) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
        names = dict(sample[0])
        for group in random.sample(_GROUPS, random.choice((0, 1, 1, 2))):
            steps = random.sample(_STEPS, random.choice((0, 0, 1))) + [random.choice(_FUSED[group])]
            names |= dict.fromkeys([f"layers.{{layer}}.{part}" for part in group], " | ".join(["f.{layer}", *steps]))
        for ours in random.sample(sorted(names), random.choice((0, 1, 1, 2))):
            steps = random.sample(_STEPS, random.choice((0, 1, 1, 2, 3)))
            name = names[ours] if random.random() < 0.6 else random.choice((*_NAMES, *names.values()))
            names[ours] = random.choice((" | ", "|", " |  ")).join([name, *steps])
        shapes = fitting(names)
        for name in random.sample(sorted(shapes), 1 if shapes and random.random() < 0.2 else 0):
            shapes[name] = random.choice((shapes[name][::-1], (7,), (1, *shapes[name]), shapes[name][:1]))
        return names, shapes

    def fitting(names: dict[str, str]) -> dict[str, tuple[int, ...]]:
        """The shapes that these sources want, where they want any."""
        shapes = {}
        wanted = tensor_shapes(base)
        for ours, text in names.items():
            try:
                for expanded, source in expand_sources({ours: text}, base.sizes.layers).items():
                    shapes[source.name] = layout(expanded, source, wanted, base.attention.kv_heads).shape
            except (LlmcError, KeyError, ValueError):  # not a source of this tensor
                continue
        return shapes

    def read(case: tuple[dict[str, str], dict[str, tuple[int, ...]]]) -> None:
        names, shapes = case
        for text in names.values():
            with contextlib.suppress(LlmcError):
                parse(text)
        spec = replace(base, tensors=names)
        found = {name: tensor(name, shape) for name, shape in shapes.items() if math.prod(shape) <= 1 << 14}
        bound = bind(spec, found, set(found), {}, "x")
        wanted = tensor_shapes(spec)
        assert {ours: t.shape for ours, t in bound.items()} == {ours: wanted[ours] for ours in bound}
        read_tensors(path, bound)

    return Reader([sample], make, read)


_HASH = "0" * 64


def _manifest(folder: Path) -> Reader:
    """A manifest whose own hash is right, so that what is in it is looked at."""
    from llmc.compiler.driver.manifest import describe_model  # slow to import

    home = folder / "model"
    home.mkdir()
    _folder_files(home)
    names = ("weights.safetensors", "lib/a.so", "lib/libtvm_runtime.so", "tokenizer.json", "chat_template.jinja")
    with read_folder(home, None) as model:
        recipe = dict.fromkeys(model.tensors, "f32")
        weights = {"file": names[0], "chunk_bytes": 8192, "chunks": [_HASH], "order": ["a", "b"]}
        variant = {"file": names[1], "name": "a", "arch": "x86_64", "requires": ["avx2"]}
        tree = describe_model(model, recipe, False, "f32", (), weights, [variant], ["step"]) | {"format": FORMAT}
    tree["files"] = {name: {"sha256": _HASH, "bytes": 100} for name in names}
    path = folder / "manifest.json"

    def signed(table: dict[str, Any]) -> bytes:
        rest = {key: value for key, value in table.items() if key != "manifest_sha256"}
        try:
            rest["manifest_sha256"] = hashlib.sha256(canonical_json(rest)).hexdigest()
        except ValueError:
            rest["manifest_sha256"] = _HASH
        return json.dumps(rest).encode("utf-8", "surrogatepass")

    samples = [signed(tree)]

    def make(random: Random) -> bytes:
        if random.random() < 0.1:
            return change_bytes(random, samples)
        changed = change_tree(random, tree)
        return signed(changed) if isinstance(changed, dict) else as_json(random, changed)

    def read(_: bytes) -> None:
        read_manifest(folder)

    return Reader(samples, make, read, (RuntimeLlmcError,), path.write_bytes)


def _folder(folder: Path) -> Reader:
    """A Hugging Face folder of two shards, one of its JSON files changed."""
    home = folder / "model"
    home.mkdir()
    trees = _folder_files(home)
    whole = {name: (home / name).read_bytes() for name in trees}
    last: list[str] = []

    def make(random: Random) -> tuple[str, bytes]:
        name = random.choice(sorted(trees))
        if random.random() < 0.1:
            return name, change_bytes(random, [whole[name]])
        return name, as_json(random, change_tree(random, trees[name]))

    def lay(case: tuple[str, bytes]) -> None:
        for name in last:
            (home / name).write_bytes(whole[name])
        last[:] = [case[0]]
        (home / case[0]).write_bytes(case[1])

    def read(_: object) -> None:
        with read_folder(home, None) as source:
            _look(source.spec)

    name = "config.json"
    return Reader([(name, whole[name])], make, read, lay=lay)


def _folder_files(home: Path) -> dict[str, Any]:
    """Writes the folder; the JSON files of it, as values."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = {
        "model_type": "llama", "vocab_size": 40, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    }  # fmt: skip
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (40, 8), "lm_head.weight": (40, 8), "model.norm.weight": (8,),
        f"{layer}.input_layernorm.weight": (8,), f"{layer}.post_attention_layernorm.weight": (8,),
        f"{layer}.self_attn.q_proj.weight": (8, 8), f"{layer}.self_attn.k_proj.weight": (4, 8),
        f"{layer}.self_attn.v_proj.weight": (4, 8), f"{layer}.self_attn.o_proj.weight": (8, 8),
        f"{layer}.mlp.gate_proj.weight": (16, 8), f"{layer}.mlp.up_proj.weight": (16, 8),
        f"{layer}.mlp.down_proj.weight": (8, 16),
    }  # fmt: skip
    places = {}
    for number in (1, 2):
        shard = f"model-0000{number}-of-00002.safetensors"
        own = {name: np.ones(shape, np.float32) for name, shape in list(shapes.items())[number - 1 :: 2]}
        places |= dict.fromkeys(own, shard)
        save_file(own, home / shard)
    tokenizer = Tokenizer(models.BPE({chr(97 + i): i for i in range(26)} | {"<s>": 26, "ab": 27}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    trees = {
        "config.json": config,
        "model.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": places},
        "generation_config.json": {"do_sample": True, "temperature": 0.7, "top_k": 5, "eos_token_id": [2]},
        "tokenizer_config.json": {"bos_token": "<s>", "chat_template": "{{ messages }}", "added_tokens_decoder": {}},
        "tokenizer.json": json.loads(tokenizer.to_str()),
    }
    for name, tree in trees.items():
        (home / name).write_text(json.dumps(tree))
    return trees


TEXT: dict[str, Callable[[Path], Reader]] = {
    "json": _json,
    "config": _config,
    "gguf-keys": _gguf_keys,
    "spec": _spec,
    "sources": _sources,
    "manifest": _manifest,
    "folder": _folder,
}
