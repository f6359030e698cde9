"""Rows of the op table: what every decoder is made of.

Letters: M rows (tokens) of this step, C model width, K / N input / output width of a linear layer, H query heads,
G kv heads, D head size, S sequences, P pages listed, V vocabulary.
"""

from __future__ import annotations

from llmc.compiler import meaning
from llmc.compiler.formats import BLOCK, FORMATS, GROUP, ROTATED, SUM_BLOCK, ceil_to
from llmc.compiler.ops.op import Attr, Op, Result, Shape


def _like_first(shapes: list[Shape], _: dict[str, Attr]) -> Result:
    return [(shapes[0], "float32")]


def _pack_result(shapes: list[Shape], attrs: dict[str, Attr]) -> Result:
    rows, columns = (int(size) for size in shapes[0])
    kind = FORMATS[str(attrs["format"])]
    return [(kind.packed_shape(rows, columns), kind.dtype)]


def quantized_rows(shapes: list[Shape], _: dict[str, Attr]) -> Result:
    rows, columns = shapes[0]
    width = ceil_to(int(columns), GROUP)
    blocks = (rows, width // BLOCK)
    totals = (rows, width // BLOCK + width // SUM_BLOCK)
    return [((rows, width // 4), "int32"), (blocks, "float32"), (totals, "float32"), (totals, "int32")]


def quantized_rotated(shapes: list[Shape], _: dict[str, Attr]) -> Result:
    rows, columns = shapes[0]
    width = ceil_to(int(columns), ROTATED)
    blocks = (rows, width // ROTATED)
    return [((rows, width // 4), "int32"), (blocks, "float32"), (blocks, "int32")]


def _top_result(shapes: list[Shape], _: dict[str, Attr]) -> Result:
    rows, columns = shapes[0]
    best = (rows, min(meaning.TOP, int(columns)))
    return [(best, "int32"), (best, "float32"), ((rows,), "float32")]


ROWS = (
    Op(
        "embedding",
        ("ids", "table"),
        (),
        lambda s, a: [((s[0][0], s[1][1]), "float32")],
        meaning.embedding,
        "rows of table (V, C) picked by ids (M,) int32, zeros for an id below 0 -> (M, C)",
        "torch.nn.Embedding",
    ),
    Op(
        "rms_norm",
        ("x", "weight"),
        ("eps",),
        _like_first,
        meaning.rms_norm,
        "x (M, C) / sqrt(mean(x^2) + eps) * weight (C,) -> (M, C)",
        "https://arxiv.org/abs/1910.07467 Eq. 4",
    ),
    Op(
        "add_rms_norm",
        ("x", "residual", "weight"),
        ("eps",),
        lambda s, a: [(s[0], "float32"), (s[0], "float32")],
        meaning.add_rms_norm,
        "sum = x + residual; (sum, rms_norm(sum)) -> 2 x (M, C)",
        "fusion of add and rms_norm",
    ),
    Op(
        "layer_norm",
        ("x", "weight", "bias"),
        ("eps",),
        _like_first,
        meaning.layer_norm,
        "(x (M, C) - mean(x)) / sqrt(var(x) + eps) * weight (C,) + bias (C,) -> (M, C)",
        "https://arxiv.org/abs/1607.06450; torch.nn.LayerNorm",
    ),
    Op(
        "add_layer_norm",
        ("x", "residual", "weight", "bias"),
        ("eps",),
        lambda s, a: [(s[0], "float32"), (s[0], "float32")],
        meaning.add_layer_norm,
        "sum = x + residual; (sum, layer_norm(sum)) -> 2 x (M, C)",
        "fusion of add and layer_norm",
    ),
    Op(
        "qk_norm",
        ("qkv", "q_weight", "k_weight"),
        ("heads", "kv_heads", "head_dim", "eps", "kind", "span"),
        _like_first,
        meaning.qk_norm,
        "norms the first H heads of qkv (M, (H + 2G) D), and the next G; the last G pass -> (M, (H + 2G) D). Kind "
        '"rms" is rms_norm, "layer" layer_norm without bias; span "head" norms each head by itself with weights (D,) '
        'that heads share, "heads" with weights (H D,) and (G D,), "all" norms the H heads as one row, and the G',
        "https://arxiv.org/abs/2302.05442 section 2, with the norm of https://arxiv.org/abs/1910.07467",
    ),
    Op(
        "qk_bias",
        ("q_bias", "k_bias"),
        ("heads", "kv_heads", "head_dim"),
        lambda s, a: [(((int(a["heads"]) + 2 * int(a["kv_heads"])) * int(a["head_dim"]),), "float32")],
        meaning.qk_bias,
        "biases of H heads and of G, each (D,) for all of them or one after another, then zeros for the last G -> "
        "((H + 2G) D,); runs at compile time",
        "torch.nn.LayerNorm's bias",
    ),
    Op(
        "scale",
        ("x",),
        ("factor",),
        _like_first,
        meaning.scale,
        "x (M, C) * factor -> (M, C)",
        "numpy.multiply; https://arxiv.org/abs/1706.03762 section 3.4 scales embeddings so",
    ),
    Op(
        "clip",
        ("x",),
        ("bound",),
        _like_first,
        meaning.clip,
        "x (M, C) bounded to -bound..bound -> (M, C)",
        "numpy.clip",
    ),
    Op(
        "soft_cap",
        ("x",),
        ("cap",),
        _like_first,
        meaning.soft_cap,
        "cap * tanh(x (M, C) / cap) -> (M, C)",
        "https://arxiv.org/abs/2408.00118 section 2, logit soft-capping",
    ),
    Op(
        "linear",
        ("x", "weight"),
        (),
        lambda s, a: [((s[0][0], s[1][0]), "float32")],
        meaning.linear,
        "x (M, K) @ weight (N, K)^T -> (M, N)",
        "torch.nn.Linear without bias",
    ),
    Op(
        "rope_table",
        ("positions", "frequencies"),
        ("magnitude",),
        lambda s, a: [((s[0][0], 2 * s[1][0]), "float32")],
        meaning.rope_table,
        "cosines then sines of positions (M,) x frequencies (R/2,), in float64, times magnitude -> (M, R)",
        "https://arxiv.org/abs/2104.09864 Eq. 34; magnitude https://arxiv.org/abs/2309.00071 section 3.4",
    ),
    Op(
        "rope",
        ("x", "table"),
        ("rotated_heads", "head_dim", "first", "layout"),
        _like_first,
        meaning.rope,
        "rotates R numbers, from number `first` on, of each of the first heads of x (M, heads * D) by table (M, R); "
        'layout "half" pairs (i, i + R/2), "interleaved" pairs (2i, 2i + 1)',
        "https://arxiv.org/abs/2104.09864 Eq. 34; GPT-NeoX and GPT-J layouts",
    ),
    Op(
        "activate",
        ("x",),
        ("activation",),
        _like_first,
        meaning.activate,
        "activation(x (M, F)) -> (M, F); meaning.ACTIVATIONS has the names",
        "silu and gelu https://arxiv.org/abs/1606.08415; relu_squared https://arxiv.org/abs/2109.08668",
    ),
    Op(
        "gated",
        ("gate_up",),
        ("activation",),
        lambda s, a: [((s[0][0], s[0][1] // 2), "float32")],
        meaning.gated,
        "activation(first half) * second half of gate_up (M, 2F) -> (M, F); activations as for activate",
        "https://arxiv.org/abs/2002.05202 SwiGLU, GEGLU",
    ),
    Op(
        "bounded_gated",
        ("gate_up",),
        ("activation", "limit", "plus"),
        lambda s, a: [((s[0][0], s[0][1] // 2), "float32")],
        meaning.bounded_gated,
        "gated of a first half of at most `limit`, a second within -limit..limit, to which `plus` is then added",
        "https://arxiv.org/abs/2508.10925 section 2.2",
    ),
    Op(
        "softplus",
        ("x",),
        (),
        _like_first,
        meaning.softplus,
        "log(1 + e^x) of x (N,) -> (N,); runs at compile time",
        "torch.nn.Softplus",
    ),
    Op(
        "xielu",
        ("x", "above", "below"),
        (),
        _like_first,
        meaning.xielu,
        "x / 2 + above x^2 where x (M, F) is above 0, else x / 2 + (below + 1 / 2) (e^min(x, -1e-6) - 1 - x) -> "
        "(M, F); above, below (1,)",
        "https://arxiv.org/abs/2411.13010 section 4",
    ),
    Op(
        "take_rows",
        ("x", "rows"),
        (),
        lambda s, a: [((s[1][0], s[0][1]), "float32")],
        meaning.take_rows,
        "x (M, C) at rows (R,) int32 -> (R, C)",
        "numpy.take",
    ),
    Op(
        "argmax",
        ("x",),
        (),
        lambda s, a: [((s[0][0],), "int32")],
        meaning.argmax,
        "first index of the greatest value of each row of x (M, V) -> (M,) int32",
        "numpy.argmax",
    ),
    Op(
        "top",
        ("x",),
        (),
        _top_result,
        meaning.top,
        "the K = min(TOP, V) greatest of each row of x (M, V), the greatest first, of equal ones that of the lower id: "
        "ids (M, K) int32, values (M, K), and log of the sum of e^x (M,), which is no number where one of the row's "
        "is none or infinite",
        "numpy.argsort, scipy.special.logsumexp",
    ),
    Op(
        "pack",
        ("weight",),
        ("format",),
        _pack_result,
        meaning.pack,
        "weight (N, K) float32 -> the packed tensor of the format (compiler/formats/); runs at compile time",
        "compiler/formats/",
    ),
    Op(
        "packed_embedding",
        ("ids", "table"),
        ("format", "width"),
        lambda s, a: [((s[0][0], int(a["width"])), "float32")],
        meaning.packed_embedding,
        "embedding whose table (V, C) is packed",
        "compiler/formats/",
    ),
    Op(
        "packed_linear",
        ("x", "weight"),
        ("format", "width"),
        lambda s, a: [((s[0][0], int(a["width"])), "float32")],
        meaning.packed_linear,
        "x (M, K) @ unpack(weight)^T, float32 activations -> (M, N = width)",
        "compiler/formats/",
    ),
    Op(
        "round_rows",
        ("x",),
        (),
        lambda s, a: [((s[0][0], ceil_to(int(s[0][1]), 2) // 2), "int32")],
        meaning.round_rows,
        "x (M, K) -> bfloat16 pairs (M, K/2) int32, the even column low",
        "compiler/formats/",
    ),
    Op(
        "bf16_linear",
        ("x", "weight"),
        ("format", "width"),
        lambda s, a: [((s[0][0], int(a["width"])), "float32")],
        meaning.bf16_linear,
        "bfloat16 pairs x (M, K/2) @ unpack(weight)^T, float32 sums -> (M, N = width)",
        "compiler/formats/",
    ),
    Op(
        "quantize_rows",
        ("x",),
        (),
        quantized_rows,
        meaning.quantize_rows,
        "x (M, K) -> int8 codes (M, K64/4) in int32 words, scales (M, K64/32), and of the codes of 32 columns, then of "
        "16, sums, times the scale, and starts, times -128 (M, 3 K64/32)",
        "compiler/formats/activations.py",
    ),
    Op(
        "rotate_rows",
        ("x",),
        ("width",),
        lambda s, a: [((s[0][0], int(a["width"])), "float32")],
        meaning.rotate_rows,
        "x (M, K) with zeros up to whole blocks of 64 columns, each times a Hadamard matrix over 8 -> (M, width), the "
        "first of them: its own inverse",
        "compiler/formats/activations.py",
    ),
    Op(
        "quantize_rotated",
        ("x",),
        (),
        quantized_rotated,
        meaning.quantize_rotated,
        "rotate_rows of x (M, K) -> int8 codes (M, K64/4) in int32 words, scales (M, K64/64), and sums of the codes of "
        "64 columns times -128 (M, K64/64)",
        "compiler/formats/activations.py",
    ),
    Op(
        "i8_linear",
        ("codes", "scales", "totals", "weight"),
        ("format", "width"),
        lambda s, a: [((s[0][0], int(a["width"])), "float32")],
        meaning.i8_linear,
        "(codes * scales) (M, K) @ stored(weight)^T -> (M, N = width); totals are starts where the format's offset is "
        "a whole number, else sums",
        "compiler/formats/",
    ),
)
