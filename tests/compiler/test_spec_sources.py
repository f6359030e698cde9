"""Values of a spec's `tensors`: what they mean, and every refusal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SpecError
from llmc.compiler.spec.sources import (
    PARTS,
    Layout,
    Source,
    Split,
    expand_sources,
    layout,
    own_part,
    parse,
    part_names,
    source_faults,
)

LAYER = "layers.{layer}."


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("wte.weight", Source("wte.weight")),
        ("model/h{layer}/w:0", Source("model/h{layer}/w:0")),
        ("a | transposed", Source("a", transposed=True)),
        ("a|transposed", Source("a", transposed=True)),
        ("a | skip 2", Source("a", skip=2)),
        ("a | q k v", Source("a", split=Split(("q", "k", "v")))),
        ("a | up gate", Source("a", split=Split(("up", "gate")))),
        ("a | q k v by group", Source("a", split=Split(("q", "k", "v"), None))),
        ("a | q v k by 4", Source("a", split=Split(("q", "v", "k"), 4))),
        ("a | row 1 of 2", Source("a", row=(1, 2))),
        ("a | flat", Source("a", flat=True)),
        ("a | squeezed | transposed", Source("a", True, squeezed=True)),
        ("a | turned by group", Source("a", turned=True)),
        ("a | k_up v_up by group | turned by group", Source("a", split=Split(("k_up", "v_up"), None), turned=True)),
        ("a | transposed | q k v | normalized", Source("a", True, split=Split(("q", "k", "v")), normalized=True)),
        ("a | transposed | skip 10 |  k  v by group ", Source("a", True, 10, split=Split(("k", "v"), None))),
    ],
)
def test_parse(text: str, source: Source) -> None:
    assert parse(text) == source


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no name of the file"),
        (" | q k v", "no name of the file"),
        ("a |", "unknown step or part ''"),
        ("a | transpose", "unknown step or part 'transpose'"),
        ("a | q key v", "unknown step or part 'key'"),
        ("a | q k gatee", "unknown step or part 'gatee' (near: gate)"),
        ("a | transposed now", "unknown step or part 'transposed'"),
        ("a | q", "at least two parts, each once, got q"),
        ("a | q k q", "at least two parts, each once, got q k q"),
        ("a | skip", "a number of rows, at least 1, after skip"),
        ("a | skip 0", "a number of rows, at least 1"),
        ("a | skip -2", "a number of rows, at least 1"),
        ("a | skip 2 3", "a number of rows, at least 1"),
        ("a | skip 9999999999", "a number of rows, at least 1"),
        ("a | skip ٣", "a number of rows, at least 1"),
        ("a | row 2 of 2", "wanted row N of M, N from 0 to M - 1"),
        ("a | row -1 of 2", "wanted row N of M"),
        ("a | row 1", "wanted row N of M"),
        ("a | row 0 of 0", "wanted row N of M"),
        ("a | row 0 of 2 | q k v", "in this order: squeezed, transposed, skip, one of row"),
        ("a | q k v | row 0 of 2", "in this order: squeezed, transposed, skip, one of row"),
        ("a | q k by", "unknown step or part 'by'"),
        ("a | q k by groups", "wanted group, expert, row or a number after by, got 'groups'"),
        ("a | q k by 0", "wanted group, expert, row or a number after by, got '0'"),
        ("a | gate up by group", "by group is for q, k, v, q_plain, q_rope, k_up, v_up, got gate up"),
        ("a | transposed | transposed", "each step once, in this order"),
        ("a | q k v | q k v", "each step once"),
        ("a | normalized | q k v", "each step once"),
        ("a | row 0 of 2 | flat", "each step once"),
        ("a | flat now", "unknown step or part 'flat'"),
        ("a | skip 1 | skip 2", "each step once"),
        ("a | q k v | transposed", "in this order"),
        ("a | skip 1 | transposed", "in this order"),
        ("a | q k v | skip 1", "in this order: squeezed, transposed, skip, one of row"),
        ("x" * 10**6 + "|", "unknown step"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=re.escape(reason)) as caught:
        parse(text)
    assert len(str(caught.value)) < 400


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(["|", "q", "k", "by", "group", "skip", "2", "transposed", "a", "\n"]), max_size=9))
def test_any_words(words: list[str]) -> None:
    try:
        source = parse(" ".join(words))
    except SpecError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert source.name
        assert (source == Source(source.name)) == ("|" not in words)


def test_own_part() -> None:
    assert [own_part(name) for name in ("layers.{layer}.q", "layers.3.up_bias", "v")] == ["q", "up", "v"]
    for name in ("layers.3.q_norm", "embedding", "layers.3.o", "layers.3.down_bias", "layers.3.xq", "qk"):
        assert own_part(name) == ""
    for part in PARTS:
        assert own_part(f"layers.0.{part}") == own_part(f"layers.0.{part}_bias") == part


def test_part_names() -> None:
    assert part_names("layers.1.gate", parse("w1 | up gate")) == ["layers.1.up", "layers.1.gate"]
    assert part_names("layers.1.down", parse("w2 | transposed")) == ["layers.1.down"]


def test_expand() -> None:
    sources = expand_sources({"embedding": "wte", f"{LAYER}q": "h.{layer}.attn | q k v"}, 2)
    assert list(sources) == ["embedding", "layers.0.q", "layers.1.q"]
    assert sources["layers.1.q"] == parse("h.1.attn | q k v")


FUSED = {f"{LAYER}{part}": "h.{layer}.attn | q k v" for part in "qkv"}
BIASES = {f"{LAYER}{part}_bias": "h.{layer}.attn.bias | q k v" for part in "qkv"}


def test_fused_tensors_are_shared() -> None:
    gated = {f"{LAYER}{part}": "h.{layer}.mlp | transposed | gate up" for part in ("up", "gate")}
    assert source_faults({"embedding": "wte", **FUSED, **BIASES, **gated, "positions": "wpe | skip 2"}) == []


SHARED = "tensors gives one name of the file to several of ours: "


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"embedding": "a\x00"}, r"tensors: 'embedding' = 'a\x00', wanted printable characters"),
        ({"embedding": "a | nosuch"}, "tensors: 'embedding' = 'a | nosuch': unknown step or part 'nosuch'"),
        (
            {"embedding": "a{layer}"},
            "tensors: 'embedding' = 'a{layer}', wanted {layer} once on both sides or on neither",
        ),
        ({f"{LAYER}o": "o"}, "{layer} once on both sides"),
        ({f"{LAYER}o": "o{layer}{layer}"}, "{layer} once on both sides"),
        ({"embedding": "a | gate up"}, "'a | gate up', which has no part for 'embedding'"),
        ({f"{LAYER}up": "a{layer} | q k v"}, "which has no part for 'layers.{layer}.up'"),
        ({"embedding": "x", "head": "x"}, SHARED + "'x' to 'embedding', 'head'; only parts of a fused tensor"),
        ({"embedding": "x | skip 1", "head": "x"}, SHARED + "'x' to"),
        ({"embedding": "x | skip 1", "head": "x | skip 1"}, SHARED + "'x' to"),
        ({f"{LAYER}q": "h.{layer}.attn | k q v"}, SHARED + "'h.{layer}.attn' to"),
        ({f"{LAYER}q": "h.{layer}.attn | q k v by group"}, SHARED),
        ({f"{LAYER}q_bias": "h.{layer}.attn | q k v"}, SHARED),
        ({f"{LAYER}o": "h.{layer}.attn"}, SHARED),
        ({f"{LAYER}gate": "x.{layer} | gate up", f"{LAYER}up_bias": "x.{layer} | gate up"}, SHARED + "'x.{layer}' to"),
        ({f"{LAYER}k": "k.{layer}"}, "tensors: nothing reads k of 'h.{layer}.attn'"),
        ({f"{LAYER}up": "h.{layer}.mlp | gate up"}, "tensors: nothing reads gate of 'h.{layer}.mlp'"),
    ],
)
def test_faults(changes: dict[str, str], reason: str) -> None:
    faults = source_faults({**FUSED, **BIASES, **changes})
    assert any(reason in fault for fault in faults), faults


def test_all_faults_at_once() -> None:
    faults = source_faults({"embedding": "a | b", "head": "h{layer}", f"{LAYER}q": "w{layer} | q k"})
    assert len(faults) == 3


def test_a_part_may_be_turned_that_another_is_not() -> None:
    """The step is for one of those that share the file's tensor."""
    shared = "kv.{layer} | k_up v_up by group"
    assert source_faults({f"{LAYER}k_up": f"{shared} | turned by group", f"{LAYER}v_up": shared}) == []
    assert source_faults({f"{LAYER}k_up": shared, f"{LAYER}v_up": "kv.{layer} | k_up v_up | turned by group"})


def test_only_matrices_of_kv_heads_are_turned() -> None:
    for ours in ("q_bias", "k"):
        with pytest.raises(SpecError, match="only the rows of a matrix of KV heads can be turned"):
            layout(ours, parse("a | turned by group"), SHAPES, 3)
    assert layout("k", parse("a | turned by group"), SHAPES | {"k": (6, 2)}, 2) == Layout((6, 2), 0, 6, 6)


SHAPES = {"q": (8, 3), "k": (4, 3), "v": (4, 3), "q_bias": (8,), "k_bias": (4,), "v_bias": (4,)}


@pytest.mark.parametrize(
    ("ours", "text", "expected"),
    [
        ("k", "a", Layout((4, 3), 0, 4, 4)),
        ("k", "a | transposed", Layout((3, 4), 0, 4, 4)),
        ("k", "a | skip 2", Layout((6, 3), 2, 4, 6 - 2)),
        ("k", "a | q k v", Layout((16, 3), 8, 4, 16)),
        ("k", "a | v q k", Layout((16, 3), 12, 4, 16)),
        ("v_bias", "a | q k v", Layout((16,), 12, 4, 16)),
        ("k", "a | transposed | skip 1 | q k v", Layout((3, 17), 9, 4, 16)),
        ("k", "a | q k v by group", Layout((16, 3), 4, 2, 8)),
        ("k_bias", "a | row 1 of 2", Layout((2, 4), 1, 1, 1)),
        ("k_bias", "a | transposed | row 1 of 2", Layout((4, 2), 1, 1, 1)),
        ("v", "a | skip 3 | q v k by 4", Layout((19, 3), 3 + 2, 1, 4)),
    ],
)
def test_layout(ours: str, text: str, expected: Layout) -> None:
    assert layout(ours, parse(text), SHAPES, 2) == expected


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="the rows of k, v do not divide into 8 pieces"):
        layout("q", parse("a | q k v by 8"), SHAPES, 2)
    for ours, text in (("q", "a | row 0 of 2"), ("q_bias", "a | skip 1 | row 0 of 2")):
        with pytest.raises(SpecError, match="only a vector can be one row, and of all rows"):
            layout(ours, parse(text), SHAPES, 2)
    with pytest.raises(SpecError, match="only a matrix can be transposed"):
        layout("q_bias", parse("a | transposed | q k v"), SHAPES, 2)
    for text in ("a | normalized", "a | row 0 of 2 | normalized"):
        with pytest.raises(SpecError, match="only rows of a matrix can be normalized"):
            layout("q_bias", parse(text), SHAPES, 2)
    with pytest.raises(SpecError, match="only a vector can be flat"):
        layout("q", parse("a | flat"), SHAPES, 2)
