"""The blocks a spec picks from, as data: what each setting means, what it may be.

A new kind is a row in CHOICES, a case in frontends/graph/build.py and its op.
"""

from __future__ import annotations

from dataclasses import dataclass

# What each number may be: far above any known model, far below what would exhaust memory before a
# weight is read. Where 0 is below the lowest, 0 stands for "none".
LIMITS: dict[str, tuple[float, float]] = {
    "sizes.vocab": (1, 1 << 24),
    "sizes.hidden": (1, 1 << 18),
    "sizes.layers": (1, 1 << 10),
    "sizes.ffn": (1, 1 << 20),
    "sizes.context": (1, 1 << 27),
    "norm.eps": (1e-20, 1.0),
    "attention.heads": (1, 1 << 12),
    "attention.kv_heads": (1, 1 << 12),
    "attention.head_dim": (2, 1 << 12),
    "attention.scale": (1e-6, 1e3),
    "attention.soft_cap": (1e-3, 1e6),
    "attention.clip": (1e-3, 1e6),
    "position.theta": (1.0, 1e15),
    "position.factor": (1.0, 1e6),
    "position.rotary_dim": (2, 1 << 12),
    "scaling.factor": (1.0, 1e6),
    "scaling.original_context": (1, 1 << 27),
    "scaling.magnitude": (1e-3, 1e3),
    "scaling.low": (1e-3, 1e6),
    "scaling.high": (1e-3, 1e6),
    "wiring.residual_scale": (1e-6, 1e6),
    "embedding.scale": (1e-6, 1e6),
    "embedding.width": (1, 1 << 18),
    "head.scale": (1e-6, 1e6),
    "head.soft_cap": (1e-3, 1e6),
    "window.size": (1, 1 << 27),
    "window.theta": (1.0, 1e15),
    "window.factor": (1.0, 1e6),
    "experts.count": (2, 1 << 12),
    "experts.used": (1, 1 << 8),
    "experts.ffn": (16, 1 << 20),
    "experts.shared_ffn": (1, 1 << 20),
    "experts.scale": (1e-6, 1e6),
    "experts.groups": (1, 1 << 12),
    "experts.groups_used": (1, 1 << 12),
}

# Numbers that may be 0, which switches off what they belong to.
SWITCHES = (
    "attention.soft_cap", "attention.clip", "position.rotary_dim", "embedding.width", "head.soft_cap",
    "experts.count", "experts.used", "experts.ffn", "experts.shared_ffn",
)  # fmt: skip

CHOICES: dict[str, tuple[str, ...]] = {
    "norm.kind": ("rms", "layer"),
    "norm.weight": ("plain", "plus_one", "none"),
    "norm.place": ("pre", "sandwich", "output", "sum"),
    "attention.kind": ("gqa",),
    "attention.qk_norm": ("none", "head", "heads", "all"),
    "position.kind": ("rope", "learned", "alibi", "scaled_alibi", "none"),
    "position.layout": ("half", "interleaved"),
    "scaling.kind": ("llama3", "yarn", "longrope"),
    "mlp.kind": ("gated", "plain"),
    "mlp.activation": ("silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu_squared"),
    "wiring.order": ("sequential", "parallel", "shared"),
    "head.kind": ("logits", "hidden"),
    "pooling.kind": ("mean", "first", "last"),
    "experts.routing": ("softmax", "sigmoid", "softmax_of_chosen"),
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of: vocabulary entries, model width, layers, MLP width, positions."""

    vocab: int
    hidden: int
    layers: int
    ffn: int
    context: int


@dataclass(frozen=True)
class Norm:
    """Every norm of the model.

    `rms`: x / sqrt(mean(x^2) + eps) * weight (https://arxiv.org/abs/1910.07467); `layer`: the mean is taken off first
    (https://arxiv.org/abs/1607.06450). `weight` "plus_one": the file stores the weight less one and reading adds it;
    "none": there is no weight. `bias` is added last.

    `place` "pre": attention and MLP read a norm of the sum so far; "output": what they give is normed before it is
    added, what they read is not; "sandwich": both (https://arxiv.org/abs/2105.13290); "sum": each sum is normed
    (https://arxiv.org/abs/1706.03762). `final`: one more before the head. `embedding`: one after the embedding.
    """

    kind: str
    eps: float
    weight: str = "plain"
    place: str = "pre"
    bias: bool = False
    final: bool = True
    embedding: bool = False


@dataclass(frozen=True)
class Attention:
    """`gqa`: `heads` queries share `kv_heads` keys and values (https://arxiv.org/abs/2305.13245).

    `scale` multiplies q.k before the softmax, `soft_cap` c makes it c tanh(q.k / c) (https://arxiv.org/abs/2408.00118).
    `bias` is for q, k and v, `output_bias` for o. `clip` bounds every q, k and v to -clip..clip. Where not `causal`, a
    token sees the whole text, what follows it too: an encoder.

    `qk_norm`, before rope, of the norm's kind and without bias (https://arxiv.org/abs/2302.05442): "head" norms each
    head with weights of head_dim that heads share, "heads" with weights of its own, "all" norms all of q as one, and k.
    """

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False
    output_bias: bool = False
    qk_norm: str = "none"
    soft_cap: float = 0.0
    clip: float = 0.0
    causal: bool = True


@dataclass(frozen=True)
class Position:
    """`rope` with base `theta`, of positions divided by `factor` (https://arxiv.org/abs/2104.09864).

    `half` rotates (x[i], x[i + R/2]), `interleaved` rotates (x[2i], x[2i + 1]), where R is `rotary_dim`, the first
    numbers of a head, or all of it when 0. A factor other than 1 is linear scaling (https://arxiv.org/abs/2306.15595).
    `plain_layers` (indices from 0, ascending) have no rope at all.

    `learned`: a table of `sizes.context` rows is added to the embedding. `alibi`: scores fall by the distance times a
    slope of the head (https://arxiv.org/abs/2108.12409); `scaled_alibi`: that times attention.scale, as the scores are.
    For these and `none` the fields of rope mean nothing.
    """

    kind: str
    theta: float = 10000.0
    layout: str = "half"
    factor: float = 1.0
    rotary_dim: int = 0
    plain_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scaling:
    """How rope's frequencies change for texts longer than `original_context`, which the model was first trained for.

    `llama3`: frequencies of few turns (below `low` in the original context) are divided by `factor`, those of many
    (above `high`) stay, in between a blend. `yarn` (https://arxiv.org/abs/2309.00071): the same with a linear ramp from
    `high` (beta_fast) to `low` (beta_slow) turns, its ends rounded to whole pairs when `round_ends`. `longrope`
    (https://arxiv.org/abs/2402.13753): pair i is divided by `long`[i] when sizes.context is above original_context, by
    `short`[i] when not. `magnitude` multiplies cosines and sines.
    """

    kind: str
    factor: float
    original_context: int
    low: float = 1.0
    high: float = 4.0
    magnitude: float = 1.0
    round_ends: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


@dataclass(frozen=True)
class Window:
    """Sliding-window attention (https://arxiv.org/abs/2004.05150) in some layers, with rope of their own.

    In `layers` (indices from 0, ascending) a row sees the last `size` tokens, its own included; `theta` and `factor`
    are for them what Position's are for the other layers, and `scaling` is not for them unless `scaled`.
    """

    size: int
    layers: tuple[int, ...]
    theta: float
    factor: float = 1.0
    scaled: bool = True


@dataclass(frozen=True)
class Mlp:
    """`gated`: down(activation(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202); `plain`: down(activation(up(x))).

    `bias` is for all of them. `gelu` is exact, `gelu_tanh` its approximation by tanh, `gelu_sigmoid` x sigmoid(1.702 x)
    (https://arxiv.org/abs/1606.08415); `relu_squared` https://arxiv.org/abs/2109.08668.
    """

    kind: str
    activation: str
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """In `layers` (indices from 0, ascending) `count` gated MLPs of width `ffn` stand in place of the one of sizes.ffn.

    A token goes through the `used` ones that the matrix router scores highest, and takes the weighted sum of what they
    give (https://arxiv.org/abs/2101.03961). By `routing`, the scores are the softmax of the router's numbers
    ("softmax"), their sigmoids ("sigmoid"), or the numbers themselves, the weights the softmax of those of the chosen
    ("softmax_of_chosen", which is what "softmax" with `renormalize` computes too). Weights are the scores, made to sum
    to 1 where `renormalize`, times `scale`. `bias` is added to the scores to choose, not to weigh.

    With `groups` above 1 only experts of the `groups_used` best groups are chosen: neighbours make a group, which is as
    good as its best expert, or for "sigmoid" its best two together (https://arxiv.org/abs/2412.19437 section 2.1.2).

    `shared_ffn`: every token also goes through an MLP of that width, 0 for none (https://arxiv.org/abs/2401.06066);
    with `shared_gate` what it gives is multiplied by the sigmoid of one more row's product with the token.
    """

    count: int = 0
    used: int = 0
    ffn: int = 0
    layers: tuple[int, ...] = ()
    routing: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    groups_used: int = 1
    shared_ffn: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class Wiring:
    """How a layer's parts are put together: what they give, times `residual_scale`, is added to the sum so far.

    `sequential`: attention, then the MLP reads the new sum. `parallel`: both read the old sum, each through a norm of
    its own (https://arxiv.org/abs/2204.06745). `shared`: both read the same norm of it (https://arxiv.org/abs/2204.02311).
    """

    order: str = "sequential"
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Embedding:
    """`scale` multiplies what is looked up; a tied head reads the table as it is.

    `bias`: a vector is added to every token's. `width` other than 0: the table has that many columns, and matrices lead
    from there to the model's width and, before the head, back.
    """

    scale: float = 1.0
    width: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Head:
    """`logits`: one number for each entry of the vocabulary; `hidden`: the last layer's output, for `pooling`.

    `tied`: the embedding is also the output matrix, and there is no tensor "head". `transform`: before it stand a
    matrix with a bias, the MLP's activation and a norm (https://arxiv.org/abs/1810.04805, of masked language models).
    Logits are multiplied by `scale`, then `soft_cap` c makes them c tanh(logit / c).
    """

    tied: bool
    kind: str = "logits"
    transform: bool = False
    bias: bool = False
    scale: float = 1.0
    soft_cap: float = 0.0


@dataclass(frozen=True)
class Pooling:
    """How an encoder's outputs of a text's tokens become one vector: their `mean`, the `first` or the `last` one.

    `normalize`: divided by its length.
    """

    kind: str
    normalize: bool = False


@dataclass(frozen=True)
class Tokens:
    """Ids with a meaning. `add_bos`: a text starts with `bos`. Any of `eos` ends the answer.

    `end`: what an encoder's text ends with.
    """

    bos: int | None
    eos: tuple[int, ...]
    add_bos: bool
    end: int | None = None
