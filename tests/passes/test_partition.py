"""partition: Before and Expected, by tensor and by layer; which part of a weight is whose; what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from llmc.compiler import kv_pages, ops
from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import parse_placement
from llmc.compiler.spec import Sizes, example
from llmc.frontends.graph.build import build
from llmc.passes.partition import WeightShare, partition


def test_by_tensor_heads_columns_and_rows_are_shared() -> None:
    """A layer with fused q/k/v, biases and alibi: what the second of two equal devices has of it."""

    @I.ir_module
    class Before:
        @R.function
        def step(
            tokens: R.Tensor(("n",), "int32"), slots: R.Tensor(("n",), "int32"), holes: R.Tensor(("s", 2), "int32"),
            pages: R.Tensor(("m",), "int32"), kv: R.Tuple(R.Tensor(("p", 2, 2, 64), "float32")),
            table: R.Tensor((64, 8), "float32"), qkv: R.Tensor((24, 8), "float32"), o: R.Tensor((8, 8), "float32"),
            o_bias: R.Tensor((8,), "float32"), up: R.Tensor((32, 8), "float32"), up_bias: R.Tensor((32,), "float32"),
            down: R.Tensor((8, 32), "float32"),
        ):  # fmt: skip
            R.func_attr({"num_input": 5})
            n = T.int64()
            with R.dataflow():
                x = R.call_dps_packed("llmc.embedding", (tokens, table), R.Tensor((n, 8), "float32"))
                heads = R.call_dps_packed("llmc.linear", (x, qkv), R.Tensor((n, 24), "float32"))
                pool = kv[0]
                mixed = R.call_dps_packed(
                    "llmc.attention",
                    (
                        heads, pool, slots, slots, holes, pages, pages,
                        2, 2, 4, T.float64(0.5), 0, R.str("f32"), T.float64(0), R.str("alibi"), 1,
                    ),
                    R.Tensor((n, 8), "float32"),
                )  # fmt: skip
                given = R.call_dps_packed("llmc.linear", (mixed, o), R.Tensor((n, 8), "float32"))
                biased = R.add(given, o_bias)
                total = R.add(x, biased)
                wide = R.call_dps_packed("llmc.linear", (total, up), R.Tensor((n, 32), "float32"))
                wide_biased = R.add(wide, up_bias)
                bent = R.call_dps_packed("llmc.activate", (wide_biased, R.str("silu")), R.Tensor((n, 32), "float32"))
                narrow = R.call_dps_packed("llmc.linear", (bent, down), R.Tensor((n, 8), "float32"))
                last = R.add(total, narrow)
                R.output(last)
            return last

    @I.ir_module
    class Expected:
        @R.function
        def step(
            tokens: R.Tensor(("n",), "int32"), slots: R.Tensor(("n",), "int32"), holes: R.Tensor(("s", 2), "int32"),
            pages: R.Tensor(("m",), "int32"), kv: R.Tuple(R.Tensor(("p", 2, 1, 64), "float32")),
            table: R.Tensor((32, 8), "float32"), qkv: R.Tensor((12, 8), "float32"), o: R.Tensor((8, 4), "float32"),
            o_bias: R.Tensor((8,), "float32"), up: R.Tensor((16, 8), "float32"), up_bias: R.Tensor((16,), "float32"),
            down: R.Tensor((8, 16), "float32"),
        ):  # fmt: skip
            R.func_attr({"num_input": 5})
            n = T.int64()
            with R.dataflow():
                ids = R.call_dps_packed("llmc.own_ids", (tokens, 32, 32), R.Tensor((n,), "int32"))
                rows = R.call_dps_packed("llmc.embedding", (ids, table), R.Tensor((n, 8), "float32"))
                x = R.call_dps_packed("llmc.all_reduce", (rows, 0), R.Tensor((n, 8), "float32"))
                pool = kv[0]
                heads = R.call_dps_packed("llmc.linear", (x, qkv), R.Tensor((n, 12), "float32"))
                mixed = R.call_dps_packed(
                    "llmc.attention",
                    (
                        heads, pool, slots, slots, holes, pages, pages,
                        1, 1, 4, T.float64(0.5), 0, R.str("f32"), T.float64(0), R.str("alibi@1/2"), 1,
                    ),
                    R.Tensor((n, 4), "float32"),
                )  # fmt: skip
                part = R.call_dps_packed("llmc.linear", (mixed, o), R.Tensor((n, 8), "float32"))
                given = R.call_dps_packed("llmc.all_reduce", (part, 0), R.Tensor((n, 8), "float32"))
                biased = R.add(given, o_bias)
                total = R.add(x, biased)
                wide = R.call_dps_packed("llmc.linear", (total, up), R.Tensor((n, 16), "float32"))
                wide_biased = R.add(wide, up_bias)
                bent = R.call_dps_packed("llmc.activate", (wide_biased, R.str("silu")), R.Tensor((n, 16), "float32"))
                part2 = R.call_dps_packed("llmc.linear", (bent, down), R.Tensor((n, 8), "float32"))
                narrow = R.call_dps_packed("llmc.all_reduce", (part2, 0), R.Tensor((n, 8), "float32"))
                last = R.add(total, narrow)
                given_back: R.Tensor((n, 8), "float32") = last
                R.output(given_back)
            return given_back

    _, second = partition(Before, parse_placement("0&1"))
    tvm.ir.assert_structural_equal(second.module, Expected)
    assert second.weights == (
        WeightShare("table", (64, 8), 0, ((32, 64),)),
        WeightShare("qkv", (24, 8), 0, ((4, 8), (12, 16), (20, 24))),
        WeightShare("o", (8, 8), 1, ((4, 8),)),
        WeightShare("o_bias", (8,), 0, ((0, 8),)),
        WeightShare("up", (32, 8), 0, ((16, 32),)),
        WeightShare("up_bias", (32,), 0, ((16, 32),)),
        WeightShare("down", (8, 32), 1, ((16, 32),)),
    )


def test_by_layer_a_stage_sends_the_sum_that_the_next_one_goes_on_with() -> None:
    @I.ir_module
    class Before:
        @R.function
        def step(
            tokens: R.Tensor(("n",), "int32"), slots: R.Tensor(("n",), "int32"), holes: R.Tensor(("s", 2), "int32"),
            pages: R.Tensor(("m",), "int32"),
            kv: R.Tuple(R.Tensor(("p", 2, 2, 64), "float32"), R.Tensor(("p", 2, 2, 64), "float32")),
            table: R.Tensor((64, 8), "float32"), frequencies: R.Tensor((2,), "float32"),
            a: R.Tensor((24, 8), "float32"), b: R.Tensor((24, 8), "float32"),
        ):  # fmt: skip
            R.func_attr({"num_input": 5})
            n = T.int64()
            with R.dataflow():
                x = R.call_dps_packed("llmc.embedding", (tokens, table), R.Tensor((n, 8), "float32"))
                angles = R.call_dps_packed(
                    "llmc.rope_table", (slots, frequencies, T.float64(1)), R.Tensor((n, 4), "float32")
                )
                heads = R.call_dps_packed("llmc.linear", (x, a), R.Tensor((n, 24), "float32"))
                turned = R.call_dps_packed(
                    "llmc.rope", (heads, angles, 4, 4, 0, R.str("half")), R.Tensor((n, 24), "float32")
                )
                pool = kv[0]
                mixed = R.call_dps_packed(
                    "llmc.attention",
                    (
                        turned, pool, slots, slots, holes, pages, pages,
                        2, 2, 4, T.float64(0.5), 0, R.str("f32"), T.float64(0), R.str("none"), 1,
                    ),
                    R.Tensor((n, 8), "float32"),
                )  # fmt: skip
                total = R.add(x, mixed)
                heads2 = R.call_dps_packed("llmc.linear", (total, b), R.Tensor((n, 24), "float32"))
                turned2 = R.call_dps_packed(
                    "llmc.rope", (heads2, angles, 4, 4, 0, R.str("half")), R.Tensor((n, 24), "float32")
                )
                pool2 = kv[1]
                mixed2 = R.call_dps_packed(
                    "llmc.attention",
                    (
                        turned2, pool2, slots, slots, holes, pages, pages,
                        2, 2, 4, T.float64(0.5), 0, R.str("f32"), T.float64(0), R.str("none"), 1,
                    ),
                    R.Tensor((n, 8), "float32"),
                )  # fmt: skip
                last = R.add(total, mixed2)
                R.output(last)
            return last

    @I.ir_module
    class Expected:
        @R.function
        def step(
            tokens: R.Tensor(("n",), "int32"), slots: R.Tensor(("n",), "int32"), holes: R.Tensor(("s", 2), "int32"),
            pages: R.Tensor(("m",), "int32"), kv: R.Tuple(R.Tensor(("p", 2, 2, 64), "float32")),
            frequencies: R.Tensor((2,), "float32"), b: R.Tensor((24, 8), "float32"),
        ):  # fmt: skip
            R.func_attr({"num_input": 5})
            n = T.int64()
            with R.dataflow():
                total = R.call_dps_packed("llmc.recv", (tokens, 0, 8), R.Tensor((n, 8), "float32"))
                heads = R.call_dps_packed("llmc.linear", (total, b), R.Tensor((n, 24), "float32"))
                angles = R.call_dps_packed(
                    "llmc.rope_table", (slots, frequencies, T.float64(1)), R.Tensor((n, 4), "float32")
                )
                turned = R.call_dps_packed(
                    "llmc.rope", (heads, angles, 4, 4, 0, R.str("half")), R.Tensor((n, 24), "float32")
                )
                pool = kv[0]
                mixed = R.call_dps_packed(
                    "llmc.attention",
                    (
                        turned, pool, slots, slots, holes, pages, pages,
                        2, 2, 4, T.float64(0.5), 0, R.str("f32"), T.float64(0), R.str("none"), 1,
                    ),
                    R.Tensor((n, 8), "float32"),
                )  # fmt: skip
                last = R.add(total, mixed)
                given_back: R.Tensor((n, 8), "float32") = last
                R.output(given_back)
            return given_back

    first, second = partition(Before, parse_placement("cpu;cuda:0"))
    tvm.ir.assert_structural_equal(second.module, Expected)
    assert [(part.layers, part.outputs) for part in (first, second)] == [((0,), {"step": ()}), ((1,), {"step": (0,)})]
    assert [str(part.device) for part in (first, second)] == ["cpu:0", "cuda:0"]
    assert _calls(first.module) == {"embedding": 1, "rope_table": 1, "linear": 1, "rope": 1, "attention": 1, "send": 1}
    assert [share.name for share in first.weights] == ["table", "frequencies", "a"]


def _calls(module: tvm.IRModule) -> dict[str, int]:
    """How often the step of a module calls each op of ours."""
    values = [binding.value for block in module["step"].body.blocks for binding in block.bindings]
    names = [found[0].name for found in map(ops.match, values) if found]
    return {name: names.count(name) for name in names}


def test_devices_of_a_stage_call_the_same_collectives() -> None:
    parts = partition(build(example()), parse_placement("0;1&2", "1:2:1"))
    first, *pair = [_calls(part.module) for part in parts]
    assert first["send"] == 2
    assert pair[0] == pair[1]
    assert (pair[0]["recv"], pair[0]["all_reduce"], pair[0]["all_gather"]) == (1, 2, 1)
    # Two devices send to one: the other still takes part in making what is sent.
    one, other, last = [_calls(part.module) for part in partition(build(example()), parse_placement("0&1;2"))]
    assert one == other
    assert (one["all_reduce"], one["send"], last["recv"]) == (3, 1, 1)


def test_shares_of_a_weight_make_the_whole() -> None:
    parts = partition(build(example()), parse_placement("0&1", "3:1"))
    weight = np.arange(48 * 32, dtype=np.float32).reshape(48, 32)
    shares = [next(share for share in part.weights if share.name == "layers.1.up") for part in parts]
    assert [share.shape for share in shares] == [(32, 32), (16, 32)]
    np.testing.assert_array_equal(np.concatenate([share.of(weight) for share in shares]), weight)


@pytest.mark.parametrize("kv_dtype", ["bf16", "q8"])
def test_pages_are_of_the_devices_layers_and_heads(kv_dtype: str) -> None:
    *_, last = partition(build(example(), kv_dtype), parse_placement("0&1;2&3"))
    (pages,) = last.module["step"].params[8].ty.fields
    assert (last.layers, last.kv_heads) == ((1,), (1,))
    assert tuple(pages.shape)[1:] == kv_pages.page_shape(kv_dtype, 1, 8)
    assert pages.dtype.dtype == str(kv_pages.KINDS[kv_dtype].dtype)


@pytest.mark.parametrize(
    ("devices", "sizes", "message"),
    [
        ("0;1;2", {}, r"3 devices cannot share 2 layers, as stages: each needs one at least"),
        ("0&1&2&3&4", {}, r"5 devices cannot share 4 heads \(4, of 2 keys and values\)"),
        ("0&1&2&3", {"ffn": 3}, r"4 devices cannot share 3 columns of an MLP"),
    ],
)
def test_too_few_of_something_is_refused_by_name(devices: str, sizes: dict[str, Any], message: str) -> None:
    spec = replace(example(), sizes=replace(example().sizes, **sizes))
    with pytest.raises(LlmcError, match=message):
        partition(build(spec), parse_placement(devices))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(LlmcError, match="no function of the module reads pages"):
        partition(tvm.IRModule({}), parse_placement("0;1"))
    with pytest.raises(LlmcError, match="embed: no layer to cut it by; a step in parts is for one stage"):
        partition(build(example(), parts=2), parse_placement("0;1"))


def test_parts_of_a_step_are_shared_by_tensor() -> None:
    (first, _) = partition(build(example(), parts=2), parse_placement("0&1"))
    assert set(first.outputs) == {"step", "turn", "embed", "part_0", "part_1", "head"}
    assert all(len(function.params) > len(first.weights) for function in first.module.functions.values())


def test_sizes_that_do_not_divide_are_cut_in_blocks() -> None:
    spec = replace(example(), sizes=Sizes(vocab=90, hidden=32, layers=2, ffn=200, context=128))
    shapes = {
        part.rank: {share.name: share.shape for share in part.weights}
        for part in partition(build(spec), parse_placement("0&1"))
    }
    assert [shapes[rank]["layers.0.down"] for rank in (0, 1)] == [(32, 128), (32, 72)]
    assert [shapes[rank]["embedding"] for rank in (0, 1)] == [(48, 32), (42, 32)]
