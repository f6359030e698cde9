"""Every CUDA kernel against its NumPy meaning: its threads run by tests/cuda/cuda_threads.py, no GPU needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import tirx

from llmc.compiler import meaning
from llmc.compiler.formats import FORMATS, from_bf16
from llmc.compiler.ops import OPS
from llmc.compiler.ops.narrowed import NARROWED
from llmc.compiler.ops.rounded import ENDING
from llmc.targets.cuda import top
from llmc.targets.cuda.finding import FEW
from llmc.targets.cuda.kv_pages import KINDS as KV_KINDS
from llmc.targets.cuda.lower import KERNELS, add_parts, make_kernel
from llmc.targets.cuda.target import CUDA_TARGETS

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
import cuda_threads
from attention_cases import ATTENTION_CASES, DEVICE_CASES, SIZES, attention, on_tensor_cores, turning
from expert_cases import EXPERT_CASES
from kernel_cases import CASES, TOLERANCE, Case, compare, embedding_case, floats, linear_case, packed
from latent_kernel_cases import LATENT_CASES, head_linear_case

TARGET = CUDA_TARGETS["cuda:sm_80"]
EVERY = CASES | EXPERT_CASES | LATENT_CASES
ATTENDING = ATTENTION_CASES | DEVICE_CASES
MAIN_FORMATS = ("f32", "bf16", "q4", "c3h")
ROWS = 5  # few: an interpreter runs every thread


def cut(case: Case) -> Case:
    """The case with few rows; not of an operand that rows are picked from."""
    if case.op == "take_rows":
        return case
    return replace(case, arrays=[a[:ROWS].copy() if i in case.symbolic else a for i, a in enumerate(case.arrays)])


def kernel(case: Case, like: list[np.ndarray]) -> tirx.PrimFunc:
    """The kernel for any number of rows, whose outputs are `like` these."""
    names: dict[int, Any] = {}
    shapes: list[list[Any]] = []
    for i, array in enumerate([*case.arrays, *like]):
        first, *rest = array.shape
        symbolic = i in case.symbolic or (i >= len(case.arrays) and first in names)
        shapes.append([names.setdefault(first, tirx.Var(f"n{len(names)}", "int64")) if symbolic else first, *rest])
    return make_kernel(case.op, TARGET, shapes, case.attrs)


def call(case: Case, like: list[np.ndarray], made: tirx.PrimFunc | None = None) -> list[np.ndarray]:
    """The outputs; operands that the op writes to are written to."""
    outputs = [np.full(array.shape, 77, array.dtype) for array in like]
    cuda_threads.run(made or kernel(case, like), [*case.arrays, *outputs])
    return outputs


def check(case: Case) -> list[np.ndarray]:
    """The kernel gives what the op means, on poisoned outputs, and leaves its operands as the op does."""
    copies = [array.copy() for array in case.arrays]
    expected = OPS[case.op].meaning(*copies, **case.attrs)
    like = list(expected) if isinstance(expected, tuple) else [expected]
    outputs = call(case, like)
    if case.op in ATTENDING:
        case = on_tensor_cores(case)
    for got, wanted in zip(outputs, like, strict=True):
        if case.op == "packed_linear":
            close(case, got, wanted)
        else:
            compare(case, got, wanted)
    for got, wanted in zip(case.arrays, copies, strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=f"{case.op}: an operand differs")
    return outputs


def close(case: Case, got: np.ndarray, wanted: np.ndarray) -> None:
    """Products of floats in two parts of bfloat16 (targets/cuda/fragments.py): what parts leave out, and sums."""
    x, weight = case.arrays
    sizes = np.abs(x) @ np.abs(FORMATS[case.attrs["format"]].stored(weight, wanted.shape[1], x.shape[1])).T
    assert (np.abs(got - wanted) <= 3 * 2.0**-18 * sizes + TOLERANCE * np.abs(wanted).max()).all()


def only(case: Case, rows: slice) -> Case:
    """The case with these rows."""
    return replace(case, arrays=[a[rows].copy() if i in case.symbolic else a for i, a in enumerate(case.arrays)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op", sorted(set(KERNELS) & set(EVERY)))
def test_a_kernel_gives_what_its_op_means(op: str, seed: int) -> None:
    check(cut(EVERY[op](np.random.default_rng([seed, len(op)]))))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op", NARROWED)
def test_results_in_bfloat16(op: str, seed: int) -> None:
    """The last result as pairs, each the nearest to what is a last bit off; of rows that a block takes in turns too."""
    rng = np.random.default_rng([seed, len(op)])
    case = cut(CASES[op](rng))
    while _last(OPS[op].meaning(*case.arrays, **case.attrs)).shape[1] % 2:
        case = cut(CASES[op](rng))
    case = replace(case, op=op + ENDING, tolerance=2.0**-8)
    results = OPS[case.op].meaning(*case.arrays, **case.attrs)
    wanted = list(results) if isinstance(results, tuple) else [results]
    *others, pairs = call(case, wanted)
    for got, other in zip(others, wanted, strict=False):
        np.testing.assert_array_equal(got, other)
    compare(case, _apart(pairs), _apart(wanted[-1]))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("kind", "size"), [("bf16", 32), ("bf16", 12), ("q4", 32), ("f32", 8)])
def test_attention_in_bfloat16(kind: str, size: int, turned: bool) -> None:
    """What rounding would make of the same kernel's floats, of few rows and of many; pages get the same."""
    rng = np.random.default_rng(size)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": size, "window": 0, "causal": 1}
    case = attention(rng, kind, lengths=[(140, 2), (3, FEW + 2)], **sizes)
    if turned:
        qkv, *others = case.arrays
        arrays, attrs = [qkv, floats(rng, len(qkv), size), *others], {**case.attrs, "layout": "half"}
        case = replace(case, op="rope_attention", arrays=arrays, attrs=attrs, symbolic=tuple(range(8)))
    plain, rounded = (replace(case, arrays=[a.copy() for a in case.arrays]) for _ in range(2))
    (floats_,) = call(plain, [np.zeros((len(case.arrays[0]), 4 * size), np.float32)])
    rounded = replace(rounded, op=case.op + ENDING)
    (pairs,) = call(rounded, [meaning.round_rows(floats_)])
    np.testing.assert_array_equal(pairs, meaning.round_rows(floats_))
    for mine, theirs in zip(rounded.arrays, plain.arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def _last(results: Any) -> np.ndarray:
    found: np.ndarray = results[-1] if isinstance(results, tuple) else results
    return found


def _apart(pairs: np.ndarray) -> np.ndarray:
    """Numbers of bfloat16 pairs."""
    return from_bf16(np.ascontiguousarray(pairs).view(np.uint16))


@pytest.mark.parametrize("width", [2100, 4200])
def test_rows_wider_than_a_block(width: int) -> None:
    """Pairs of more than one turn, and threads without any in the last; a row has the same bits alone."""
    rng = np.random.default_rng(1)
    x, weight = floats(rng, 3, width), floats(rng, width)
    case = Case("rms_norm" + ENDING, [x, weight], {"eps": 1e-5}, (0,), 2.0**-8)
    wanted = OPS[case.op].meaning(x, weight, eps=1e-5)
    (found,) = call(case, [wanted])
    compare(case, _apart(found), _apart(wanted))
    np.testing.assert_array_equal(call(only(case, slice(1, 2)), [wanted[:1]])[0], found[1:2])


@pytest.mark.parametrize("span", ["head", "heads", "all"])
def test_norms_of_heads(span: str) -> None:
    """More heads than a block has, and wider than a warp reads at once; of rows alone, too."""
    rng = np.random.default_rng(len(span))
    attrs = {"heads": 5, "kv_heads": 2, "head_dim": 132, "eps": 1e-6, "kind": "layer", "span": span}
    weights = [floats(rng, 132 if span == "head" else count * 132) for count in (5, 2)]
    case = Case("qk_norm", [floats(rng, 3, 9 * 132) + np.float32(0.5), *weights], attrs, (0,))
    np.testing.assert_array_equal(check(only(case, slice(1, 2)))[0], check(case)[0][1:2])


@pytest.mark.parametrize(("count", "size"), [(2, 5), (3, 257), (8, 512)])
def test_parts_are_added_in_their_order(count: int, size: int) -> None:
    """What GPUs exchange, to the last bit as workers on CPUs add it."""
    random = np.random.default_rng(size)
    parts = floats(random, count, size) * np.float32(10.0) ** random.integers(-3, 4, (count, 1)).astype(np.float32)
    wanted, total = parts[0].copy(), np.full(size, 77, np.float32)
    for part in parts[1:]:
        wanted += part
    cuda_threads.run(add_parts(TARGET), [parts, total])
    np.testing.assert_array_equal(total, wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_layer_of_every_format(name: str) -> None:
    """Of several rows and of one."""
    case = linear_case(np.random.default_rng(len(name)), "packed_linear", name, 3)
    (several,) = check(case)
    np.testing.assert_array_equal(check(only(case, slice(1, 2)))[0], several[1:2])


@pytest.mark.parametrize(("op", "name"), [("bf16_linear", "bf16"), *(("packed_linear", name) for name in MAIN_FORMATS)])
def test_a_row_of_a_linear_layer_beside_others(op: str, name: str) -> None:
    """Every launch there is, in two blocks each: a row has the same bits alone, in a batch and in a prefill."""
    case = linear_case(np.random.default_rng(7), op, name, 67)
    (most,) = check(case)
    for rows in (slice(1, 2), slice(20, 29), slice(30, 67)):
        np.testing.assert_array_equal(check(only(case, rows))[0], most[rows])


@pytest.mark.thorough_if(case=lambda name, width: (name, width) == ("q4", 17))
@pytest.mark.parametrize(("name", "width", "columns"), [("q4", 150, 300), ("q4", 17, 1120), ("r3h", 17, 300)])
def test_outputs_of_several_blocks_and_strands_of_several_slabs(name: str, width: int, columns: int) -> None:
    rng = np.random.default_rng(width)
    arrays = [floats(rng, 66, columns), packed(rng, name, width, columns)]
    case = Case("packed_linear", arrays, {"format": name, "width": width}, (0,))
    (most,) = check(case)
    for rows in (slice(9), slice(2)):
        np.testing.assert_array_equal(check(only(case, rows))[0], most[rows])


@pytest.mark.parametrize(
    "name", ["f32", "q4", "q5", "q6", "q8", "q8_b32", "q3h", "c3h", "r8", "r6", "r4", "q2_k", "mxfp4"]
)
def test_rounded_rows_with_weights_of_any_format(name: str) -> None:
    """Weights are not rounded, whatever x is."""
    case = linear_case(np.random.default_rng(3), "bf16_linear", name, 3)
    x = from_bf16(case.arrays[0].view(np.uint16))
    columns = case.arrays[1].shape[1] if name == "f32" else x.shape[1]  # x may have one more, to make pairs
    wanted = x[:, :columns] @ FORMATS[name].stored(case.arrays[1], int(case.attrs["width"]), columns).T
    compare(replace(case, tolerance=2.0**-16), call(case, [wanted])[0], wanted)


@pytest.mark.parametrize("name", ["f32", "bf16", "q4", "c3h", "q4_k"])
def test_matrices_of_heads(name: str) -> None:
    """Of several rows, and of one alone: the same bits."""
    for kind in ["packed", *(["bf16"] if name == "bf16" else [])]:
        case = head_linear_case(np.random.default_rng(7), kind, name)
        x, weight = case.arrays
        x = np.repeat(x, 2, axis=0)[:3]
        (several,) = check(replace(case, arrays=[x, weight]))
        (alone,) = check(replace(case, arrays=[x[1:2].copy(), weight]))
        np.testing.assert_array_equal(alone[0], several[1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_look_up_in_every_format(name: str) -> None:
    check(cut(embedding_case(np.random.default_rng(len(name)), name)))


@pytest.mark.thorough_if(case=lambda kind, size: size not in {"bf16": (7, 80), "q8": (64,)}.get(kind, (80,)))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KV_KINDS)
def test_attention_over_pages(kind: str, size: int) -> None:
    """Sequences of any lengths; windows, holes, soft caps and heads that share."""
    for seed in range(2):
        rng = np.random.default_rng([size, seed, len(kind)])
        check(attention(rng, kind, head_dim=size, bias="none", causal=1))


@pytest.mark.parametrize("kind", KV_KINDS)
def test_attention_goes_over_chunks(kind: str) -> None:
    """Texts longer than a chunk of slots, of one row and of several; the row gives the same bits either way."""
    rng = np.random.default_rng(len(kind))
    more = {"heads": 6, "kv_heads": 2, "head_dim": 64, "bias": "none", "causal": 1, "window": 0}
    case = attention(rng, kind, lengths=[(150, 3), (290, 1), (0, 2)], **more)
    whole = check(replace(case, arrays=[a.copy() for a in case.arrays]))[0]
    check(attention(rng, kind, lengths=[(300, 2)], **more | {"window": 140}))
    np.testing.assert_array_equal(check(rows_of(case, [3]))[0][0], whole[3])


@pytest.mark.thorough_if(case=lambda kind, size: kind == "f32" or size == 64)
@pytest.mark.parametrize(
    ("hole", "kind", "heads", "size"),
    # The second hole covers a chunk. Heads of 32 and 64 go through shared memory.
    [((40, 230), "f32", 8, 20), ((0, 128), "bf16", 8, 20), ((40, 230), "bf16", 8, 32), ((0, 128), "bf16", 3, 64)],
)
def test_attention_of_many_rows_and_of_few(hole: tuple[int, int], kind: str, heads: int, size: int) -> None:
    """A block goes over a text, or one for each chunk: the same bits, whoever is in the step besides, in any order."""
    sizes = {"heads": heads, "kv_heads": 1, "head_dim": size, "bias": "none", "causal": 1, "window": 0}
    lengths = [(250, FEW + 3), (130, FEW), (3, FEW + 9)]
    case = attention(np.random.default_rng(hole), kind, lengths=lengths, **sizes)
    case.arrays[4][0] = hole
    rows = check(case)[0]
    for picked in ([0], [FEW + 2], [4, FEW + 4], np.random.default_rng(1).permutation(len(rows))):
        again = rows_of(case, picked)  # what the rows have written is in pages now
        np.testing.assert_array_equal(check(again)[0], rows[picked], err_msg=str(picked))


@pytest.mark.parametrize("causal", [0, 1])
def test_more_rows_than_a_block_has(causal: int) -> None:
    """Of one sequence and of several, in a window; steps of so many rows read no page early."""
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 32, "bias": "none", "causal": causal, "window": 100}
    check(attention(np.random.default_rng(5), "bf16", lengths=[(90, 75), (140, 2), (0, FEW + 1)], **sizes))


@pytest.mark.parametrize(("turned", "layout"), [(32, "half"), (16, "interleaved"), (12, "half")])
def test_heads_that_are_turned_by_fours_or_not(turned: int, layout: str) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "bias": "none", "causal": 1}
    case = attention(np.random.default_rng(7), "bf16", lengths=[(20, 3), (3, FEW + 1)], **sizes)
    qkv, *pages = case.arrays
    table = floats(np.random.default_rng(8), len(qkv), turned)
    attrs = {**case.attrs, "layout": layout}
    check(replace(case, op="rope_attention", arrays=[qkv, table, *pages], attrs=attrs, symbolic=tuple(range(8))))


def test_attention_of_many_sequences_of_few_rows() -> None:
    """A block looks at several that are not its own, one after another."""
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 20, "bias": "none", "causal": 1}
    lengths = [(5, 2), (9, 3), (3, FEW + 1), (4, 2), (5, 2)]
    check(attention(np.random.default_rng(1), "bf16", lengths=lengths, **sizes))


def rows_of(case: Case, picked: Any) -> Case:
    """These rows of attention, in this order."""
    qkv, kv, seqs, slots, *tables = case.arrays
    return replace(case, arrays=[qkv[picked], kv, seqs[picked], slots[picked], *tables])


@pytest.mark.thorough_if(case=lambda size, kind: kind != "bf16")
@pytest.mark.parametrize(("size", "kind"), [(128, "bf16"), (160, "f32"), (256, "bf16"), (256, "q8"), (576, "q4")])
def test_heads_of_any_width(size: int, kind: str) -> None:
    """As wide as a warp reads at once, and wider; of few rows and of many."""
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": size, "bias": "none", "causal": 1}
    check(attention(np.random.default_rng(3), kind, lengths=[(20, 2), (3, FEW + 1)], **sizes))


@pytest.mark.parametrize("kind", KV_KINDS)
@pytest.mark.parametrize("op", ["load_keys", "store_keys", "copy_pages"])
def test_keys_out_of_pages_and_back(op: str, kind: str) -> None:
    for size in (7, 64):
        check(turning(np.random.default_rng(size), kind, op, size))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op", ["attention", "attention_with_sinks", "attention_by_distance"])
def test_attention_with_biases(op: str, seed: int) -> None:
    """By distance, in one direction and in both; sinks; windows, holes and caps with them."""
    rng = np.random.default_rng([seed, len(op)])
    lengths = [(int(rng.integers(0, 40)), int(rng.integers(1, 13))) for _ in range(2)]
    sizes = {"heads": 6, "kv_heads": int(rng.choice([1, 2, 3])), "head_dim": int(rng.choice([7, 16]))}
    more = {"bias": ["none", "alibi", "scaled_alibi@6/16"][seed], "causal": seed % 2}
    check(attention(rng, str(rng.choice(list(KV_KINDS))), op, lengths, **sizes, **more))


@pytest.mark.thorough_if(case=lambda kind, op: op == "rope_attention" and kind in ("f32", "q8"))
@pytest.mark.parametrize("op", ["cross_attention", "store_kv", "short_convolution", "rope_attention"])
@pytest.mark.parametrize("kind", KV_KINDS)
def test_sources_and_what_is_kept_of_them(kind: str, op: str) -> None:
    for seed in range(2):
        check(ATTENDING[op](np.random.default_rng([seed, len(op)]), kind))


def test_heads_of_one_kv_head() -> None:
    """More than a block takes go to several; a number of them that nothing divides, each to its own."""
    for heads in (12, 11):
        sizes = {"heads": heads, "kv_heads": 1, "head_dim": 10, "bias": "alibi", "causal": 1}
        check(attention(np.random.default_rng(heads), "f32", lengths=[(9, 2)], **sizes))


def test_a_sum_of_rows_and_a_bias() -> None:
    rng = np.random.default_rng(2)
    for width in (300, 301, 302, 1100):  # four numbers a thread, one, two; several blocks
        for other in ((ROWS, width), (width,)):
            x, y, out = floats(rng, ROWS, width), floats(rng, *other), np.full((ROWS, width), 77, np.float32)
            cuda_threads.run(make_kernel("add", TARGET, [list(a.shape) for a in (x, y, out)], {}), [x, y, out])
            np.testing.assert_array_equal(out, x + y)


@pytest.mark.parametrize(("op", "width"), [("gated", 2056), ("gated", 2058), ("activate", 1100), ("round_rows", 1102)])
def test_places_that_blocks_share(op: str, width: int) -> None:
    x = floats(np.random.default_rng(width), 3, width)
    check(Case(op, [x], {} if op == "round_rows" else {"activation": "silu"}, (0,)))


@pytest.mark.parametrize(
    ("columns", "width"), [(64, 64), (100, 128), (100, 100), (576, 576), (2048, 2048), (2112, 2050), (129, 63)]
)
def test_rotated_rows(columns: int, width: int) -> None:
    """The bits of the meaning: of half a warp, of more than a block; columns are added and left out."""
    x = floats(np.random.default_rng(columns), 3, columns)
    check(Case("rotate_rows", [x], {"width": width}, (0,), tolerance=0))


def test_rows_that_hold_what_is_no_number() -> None:
    """As on CPUs: the log of the sum is none either, and ids are ids."""
    x = floats(np.random.default_rng(1), 3, 90)
    x[0, 5], x[1, 7], x[2, 1] = np.nan, np.inf, -np.inf
    ids, values, normalizers = call(Case("top", [x], {}, (0,)), list(OPS["top"].meaning(x)))
    assert np.isfinite(normalizers).tolist() == [False, False, True]
    assert ((ids >= 0) & (ids < 90)).all()
    assert values[1, 0] == np.inf
    np.testing.assert_array_equal(ids[1:], OPS["top"].meaning(x[1:])[0])


@pytest.mark.thorough_if(case=lambda width, columns: width > 30000)
@pytest.mark.parametrize(("width", "columns"), [(6145, 16), (32000, 16), (270000, 16), (6145, 1), (9100, 1)])
def test_the_best_of_rows_that_blocks_share(width: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in any order, and in order, and of equal numbers; a few of them, also of what is no number, in one block.

    `columns` 1: of more blocks than widths have that models have.
    """
    if columns == 1:
        monkeypatch.setattr(top, "COLUMNS", 1)
        monkeypatch.setattr(top, "MOST_COLUMNS", 1)
    rng = np.random.default_rng(width)
    x = floats(rng, 8, width) * np.float32(4)
    x[1], x[2], x[3] = np.sort(x[1]), np.sort(x[2])[::-1], x[3].round()
    x[4], x[4, 2000:2100], x[4, 5000:] = -np.inf, 1, 0
    x[5, 4500:], x[5, :100] = -0.0, 0
    x[6, 1:], x[6, width - 5 :] = -np.inf, 3
    x[7, 3] = x[7, width - 1] = np.nan
    like = list(OPS["top"].meaning(x))
    found = call(Case("top", [x], {}, (0,)), like)
    np.testing.assert_array_equal(found[0], like[0])
    np.testing.assert_array_equal(found[1], like[1])
    np.testing.assert_allclose(found[2], like[2], rtol=1e-6)
    alone = call(Case("top", [x[5:6]], {}, (0,)), [each[:1] for each in like])
    for got, beside in zip(alone, found, strict=True):
        np.testing.assert_array_equal(got, beside[5:6])
