"""ModelSpec: round trips, and every fault named at once."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SpecError
from llmc.compiler.spec import (
    CHOICES,
    LIMITS,
    SWITCHES,
    Embedding,
    Head,
    ModelSpec,
    Pooling,
    Scaling,
    Tokens,
    Window,
    example,
    expand,
    from_dict,
    from_toml,
    tensor_shapes,
    to_dict,
    to_toml,
)

replace = dataclasses.replace
LAYER = "layers.{layer}."
NORMS = {f"{LAYER}{x}_norm": f"n.{{layer}}.{x}" for x in ("q", "k", "attention_post", "mlp_post")}
NORMS |= {f"{LAYER}{x}_norm_bias": f"nb.{{layer}}.{x}" for x in ("attention", "attention_post", "mlp", "mlp_post")}
NORMS |= {"final_norm_bias": "final_norm.bias"}
BIASES = {f"{LAYER}{x}_bias": f"b.{{layer}}.{x}" for x in ("q", "k", "v", "o", "gate", "up", "down")}


def full() -> ModelSpec:
    """A spec with everything that is optional."""
    spec = example()
    return replace(
        spec,
        norm=replace(spec.norm, weight="plus_one", place="sandwich", bias=True),
        attention=replace(spec.attention, bias=True, output_bias=True, qk_norm="head", qk_norm_place="after_rope"),
        mlp=replace(spec.mlp, bias=True),
        embedding=Embedding(scale=5.5),
        window=Window(size=16, layers=(1,), theta=1e4),
        scaling=Scaling("llama3", 8.0, 64),
        head=replace(spec.head, tied=False),
        tokens=Tokens(None, (), False),
        tensors=spec.tensors | BIASES | NORMS | {"head": "lm_head.weight"},
    )


def encoder() -> ModelSpec:
    """The example as an encoder that gives vectors."""
    spec = example()
    return replace(
        spec,
        attention=replace(spec.attention, causal=False),
        head=Head(tied=True, kind="hidden"),
        pooling=Pooling("mean", normalize=True),
        tokens=Tokens(1, (), True, end=2),
    )


@pytest.mark.parametrize("spec", [example(), full(), encoder()])
def test_round_trips(spec: ModelSpec) -> None:
    assert from_toml(to_toml(spec)) == spec
    assert from_dict(json.loads(json.dumps(to_dict(spec)))) == spec
    assert to_toml(from_toml(to_toml(spec))) == to_toml(spec)


names = st.text(min_size=1, max_size=200).filter(str.isprintable)
floats = st.floats(*map(float, LIMITS["position.theta"]))


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    name=names,
    theta=floats,
    eps=st.floats(*map(float, LIMITS["norm.eps"])),
    context=st.integers(*map(int, LIMITS["sizes.context"])),
    eos=st.lists(st.integers(0, 63), max_size=8, unique=True),
    file_name=names.filter(lambda text: "{layer}" not in text and "|" not in text),
)
def test_round_trips_of_any_values(
    name: str, theta: float, eps: float, context: int, eos: list[int], file_name: str
) -> None:
    spec = example()
    spec = replace(
        spec,
        name=name,
        sizes=replace(spec.sizes, context=context),
        norm=replace(spec.norm, eps=eps),
        position=replace(spec.position, theta=theta),
        tokens=replace(spec.tokens, eos=tuple(eos)),
        tensors=spec.tensors | {"embedding": f"e.{file_name}"},
    )
    assert from_toml(to_toml(spec)) == spec
    assert from_dict(json.loads(json.dumps(to_dict(spec)))) == spec


def test_shapes_and_names() -> None:
    shapes = tensor_shapes(full())
    assert shapes["layers.1.q"] == (32, 32)
    assert shapes["layers.1.k"] == (16, 32)
    assert shapes["layers.0.down"] == (32, 48)
    assert shapes["layers.0.gate_bias"] == (48,)
    assert shapes["layers.1.k_norm"] == (8,)
    assert shapes["layers.0.mlp_post_norm"] == (32,)
    assert shapes["head"] == (64, 32)
    assert list(shapes)[0] == "embedding"
    assert list(shapes)[-3:] == ["final_norm", "final_norm_bias", "head"]
    assert list(expand(full())) == list(shapes)
    assert expand(full())["layers.1.q_bias"] == "b.1.q"
    assert "head" not in tensor_shapes(example())


def bad(path: str, value: Any) -> str:
    """The refusal of the example, or of the full spec where only that has the block, with one value changed."""
    block = path.split(".")[0]
    spec = full() if block in ("window", "scaling", "position", "norm", "wiring") else example()
    is_encoder = block == "pooling" or path in ("attention.causal", "head.transform")
    plain = to_dict(encoder() if is_encoder else spec)
    if block == "encoder":
        plain[block] = {"layers": 1, "ffn": 48}
    if block == "convolution":
        plain[block] = {"layers": [0], "size": 3}
    table, _, key = path.rpartition(".")
    (plain[table] if table else plain)[key] = value
    with pytest.raises(SpecError) as caught:
        from_dict(plain)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2000
    return message


@pytest.mark.parametrize("path", LIMITS)
def test_numbers_out_of_bounds(path: str) -> None:
    low, high = LIMITS[path]
    for value in (low - 1 or -2, -1, -1 if path in SWITCHES else 0, high * 2, 10**300):
        assert f"{path} = " in bad(path, value)
    for value in (math.nan, math.inf, -math.inf):
        assert path in bad(path, value)
    for value in ("1", True, None, [1], {}):
        assert path in bad(path, value)
    assert path in bad(path, 10**5000)


@pytest.mark.parametrize("path", CHOICES)
def test_unknown_kinds(path: str) -> None:
    assert f"{path} = 'nosuch', llmc knows: {CHOICES[path][0]}" in bad(path, "nosuch")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("attention.kv_heads", 3, "heads = 4 is no multiple of kv_heads = 3"),
        ("attention.head_dim", 7, "head_dim = 7, wanted an even number"),
        ("window.layers", [], "window.layers has no layer; leave window out"),
        ("window.layers", [2], "window.layers = (2,), wanted indices from 0 to 1, ascending"),
        ("position.plain_layers", [1, 0], "position.plain_layers = (1, 0), wanted indices from 0 to 1, ascending"),
        ("position.rotary_dim", 10, "position.rotary_dim = 10, wanted an even number up to 8"),
        ("position.kind", "alibi", "scaling is for rope, but position.kind is alibi"),
        ("scaling.short", [1.0], "scaling.short and scaling.long are for longrope, not for llama3"),
        ("scaling.kind", "longrope", "scaling.long = (), wanted 4 numbers above 0"),
        ("scaling.long", ["1"], "wanted a list of numbers"),
        ("pooling", None, "head.kind = hidden and a table [pooling] go together"),
        ("attention.causal", True, "pooling.kind = mean needs attention.causal = false"),
        ("head.transform", True, "head.kind = hidden has no weights"),
        ("attention.qk_norm_place", "after_rope", "attention.qk_norm = none has neither"),
        ("pooling.tokens", 129, "pooling.tokens = 129, wanted at most sizes.context = 128"),
        ("attention.qk_norm_place", "after", "attention.qk_norm_place = 'after', llmc knows: before_rope, after_rope"),
        ("attention.gate", "all", "attention.gate = 'all', llmc knows: none, each, head"),
        ("attention.sinks", True, "tensors lacks layers.{layer}.sinks"),
        ("norm.first_plain", 1, "norm.first_plain = 1, wanted true or false"),
        ("mlp.activation", "xielu", "mlp.activation = xielu is for mlp.kind = plain"),
        ("mlp.plus_one", True, "mlp.plus_one needs a limit"),
        ("tokens.end", 64, "tokens.end = 64, wanted an id from 0 to 63"),
        ("norm.weight", "none", "norm.bias is true, but norm.weight is none"),
        ("wiring.order", "parallel", "wiring.order = parallel needs norm.place = pre, got sandwich"),
        ("window.layers", [-1, 0], "window.layers = (-1, 0)"),
        ("window.layers", [1, 0], "window.layers = (1, 0)"),
        ("window.layers", [1, 1], "window.layers = (1, 1)"),
        ("window.layers", [True], "window.layers = [True], wanted a list of whole numbers"),
        ("window.sise", 3, "unknown key window.'sise' (near: size)"),
        ("window", 3, "window is 3, wanted a table"),
        ("embedding", None, "embedding is None, wanted a table"),
        ("tokens.bos", 64, "tokens.bos = 64, wanted an id from 0 to 63"),
        ("tokens.bos", -1, "tokens.bos = -1"),
        ("tokens.eos", [64], "tokens.eos = 64"),
        ("tokens.eos", [2, 2], "each once"),
        ("tokens.eos", list(range(64)) * 2, "128 ids"),
        ("tokens.eos", ["2"], "a list of whole numbers"),
        ("tokens.eos", 2, "tokens.eos = 2"),
        ("tokens.add_bos", 1, "tokens.add_bos = 1, wanted true or false"),
        ("name", "", "wanted 1 to 200 printable"),
        ("name", "a\nb", r"'a\nb'"),
        ("name", "x" * 201, "wanted 1 to 200 printable"),
        ("sizes", [], "sizes is [], wanted a table"),
        ("tensors", {"embedding": 1}, "a table of texts"),
        ("tensors", {}, "tensors lacks embedding"),
        ("tensors.head", "x", "tensors has unused 'head'"),
        ("tensors.embeding", "x", "'embeding' (near: embedding)"),
        ("tensors.embedding", "final_norm", "one name of the file to several"),
        ("tensors.embedding", "x{layer}", "on both sides or on neither"),
        (f"tensors.{LAYER}q", "q", "on both sides or on neither"),
        ("tensors.embedding", "a\x00", "wanted printable characters"),
    ],
)
def test_what_does_not_hold_together(path: str, value: Any, message: str) -> None:
    plain = to_dict(example())
    if path.startswith("tensors."):
        plain["tensors"][path.removeprefix("tensors.")] = value
        with pytest.raises(SpecError) as caught:
            from_dict(plain)
        assert message in str(caught.value)
    else:
        assert message in bad(path, value)


def test_add_bos_needs_a_bos() -> None:
    with pytest.raises(SpecError, match="tokens.bos is not given"):
        replace(example(), tokens=Tokens(None, (2,), True))


def test_every_fault_is_told_at_once() -> None:
    text = to_toml(example()).replace("heads = 4", "headz = 4").replace("[mlp]", "[mpl]")
    text = text.replace("vocab = 64", 'vocab = "many"')
    with pytest.raises(SpecError) as caught:
        from_toml(text)
    message = str(caught.value)
    for wanted in ("attention.'headz' (near: heads)", "missing key attention.heads", "'mpl' (near: mlp)"):
        assert wanted in message
    assert "missing key mlp" in message
    assert "sizes.vocab = 'many'" in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "]",
        "a = 1\na = 2",
        "name = 5",
        "[sizes]\nvocab = nan",
        "a = [" * 5000,
        "\0",
        "x" * (1 << 21),
        f"a = {'9' * 5000}",
    ],  # fmt: skip
)
def test_bad_toml(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_toml(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(at=st.integers(0, 1200), patch=st.text(max_size=4), drop=st.integers(0, 8))
def test_random_damage(at: int, patch: str, drop: int) -> None:
    text = to_toml(example())
    damaged = text[:at] + patch + text[at + drop :]
    try:
        assert isinstance(from_toml(damaged), ModelSpec)
    except SpecError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
