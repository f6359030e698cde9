"""The blocks a spec picks from, as data: what each setting means, what it may be.

A new kind is a row in limits.py, a case in frontends/graph/build.py and its op.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    `first_plain`: the first layer's attention reads the sum as it is (https://arxiv.org/abs/2412.13663 section 2.1).
    """

    kind: str
    eps: float
    weight: str = "plain"
    place: str = "pre"
    bias: bool = False
    final: bool = True
    embedding: bool = False
    first_plain: bool = False


@dataclass(frozen=True)
class Attention:
    """`gqa`: `heads` queries share `kv_heads` keys and values (https://arxiv.org/abs/2305.13245). `mla`: see Latent.

    `scale` multiplies q.k before the softmax, `soft_cap` c makes it c tanh(q.k / c) (https://arxiv.org/abs/2408.00118).
    `bias` is for q, k and v, `output_bias` for o. `clip` bounds every q, k and v to -clip..clip. Where not `causal`, a
    token sees the whole text, what follows it too: an encoder.

    `qk_norm`, of the norm's kind (https://arxiv.org/abs/2302.05442): "head" norms each head with weights of head_dim
    that heads share, "heads" with weights of its own, "all" norms all of q as one, and k. `qk_norm_bias` is added
    last; `qk_norm_place` "after_rope": what rope has turned is normed, else what it turns.

    `sinks`: a number of each head is one more score of every row, whose weight goes nowhere
    (https://arxiv.org/abs/2309.17453). `gate`: what the heads give is multiplied by the sigmoid of one more matrix's
    product with what attention reads, "each" number by its own, or all of a "head" by one
    (https://arxiv.org/abs/2505.06708).
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
    qk_norm_bias: bool = False
    qk_norm_place: str = "before_rope"
    sinks: bool = False
    gate: str = "none"


@dataclass(frozen=True)
class Latent:
    """With attention.kind `mla` all that is kept of a token is a latent of `kv_rank` numbers and one rotated key.

    Each of the `heads` has a key of head_dim numbers: `plain_dim` that the matrix k_up makes of the latent, and the
    `rope_dim` rotated ones, which all heads share; its value, `value_dim` numbers, is what v_up makes of the latent
    (https://arxiv.org/abs/2405.04434 section 2.1). `q_rank` other than 0: queries too are made of a latent, of so many
    numbers. Latents go through an RMS norm with an `eps` of its own. attention.bias is that of q_down, kv_down, k_rope.
    """

    q_rank: int = 0
    kv_rank: int = 0
    plain_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    eps: float = 1e-6


@dataclass(frozen=True)
class Position:
    """`rope` with base `theta`, of positions divided by `factor` (https://arxiv.org/abs/2104.09864).

    `half` rotates (x[i], x[i + R/2]), `interleaved` rotates (x[2i], x[2i + 1]), where R is `rotary_dim`, the first
    numbers of a head, or all of it when 0. A factor other than 1 is linear scaling (https://arxiv.org/abs/2306.15595).
    `plain_layers` (indices from 0, ascending) have no rope at all. `backwards`: by the negative angle.

    `learned`: a table of `sizes.context` rows is added to the embedding. `alibi`: scores fall by the distance times a
    slope of the head (https://arxiv.org/abs/2108.12409); `scaled_alibi`: that times attention.scale, as the scores are.
    For these and `none` the fields of rope mean nothing.

    `sinusoidal`: the sines, then the cosines, of (position + `offset`) * theta^(-i / `pairs`), i from 0 to C/2 - 1, are
    added to the embedding; 0 pairs are C/2 (https://arxiv.org/abs/1706.03762 section 3.5).

    `relative`: a number of the head is added to a score, by how far the key is from the row: a bucket each for small
    distances, buckets that widen up to `distance`, the last for all beyond, `buckets` in all
    (https://arxiv.org/abs/1910.10683 section 2.1). One table serves all layers, or each has its own where `per_layer`.
    """

    kind: str
    theta: float = 10000.0
    layout: str = "half"
    factor: float = 1.0
    rotary_dim: int = 0
    plain_layers: tuple[int, ...] = ()
    offset: int = 0
    pairs: int = 0
    buckets: int = 0
    distance: int = 0
    per_layer: bool = False
    backwards: bool = False


@dataclass(frozen=True)
class Scaling:
    """How rope's frequencies change for texts longer than `original_context`, which the model was first trained for.

    `llama3`: frequencies of few turns (below `low` in the original context) are divided by `factor`, those of many
    (above `high`) stay, in between a blend. `yarn` (https://arxiv.org/abs/2309.00071): the same with a linear ramp from
    `high` (beta_fast) to `low` (beta_slow) turns, its ends rounded to whole pairs when `round_ends`. `longrope`
    (https://arxiv.org/abs/2402.13753): pair i is divided by `long`[i] when sizes.context is above original_context, by
    `short`[i] when not. `dynamic` (NTK-aware): the base grows as it must for texts of sizes.context tokens, and stays
    up to original_context. `proportional`: only the first `part` of the pairs turn, with frequencies as if all did,
    divided by `factor`. `magnitude` multiplies cosines and sines.

    `queries` g other than 0: queries at position p are multiplied by 1 + g ln(1 + p // original_context), so that
    scores stay sharp (https://arxiv.org/abs/2501.19399).
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
    queries: float = 0.0
    part: float = 1.0


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
class Convolution:
    """A short convolution in place of attention in some layers (https://arxiv.org/abs/2511.23404 section 2.1).

    In `layers` (indices from 0, ascending) the matrix conv_in makes three numbers b, c and x of every channel, of which
    there are sizes.hidden. A channel sums b x of the last `size` tokens, its own included, by weights of its own; the
    last row of conv is for the token's own. conv_out takes c times that sum.
    """

    size: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Mlp:
    """`gated`: down(activation(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202); `plain`: down(activation(up(x))).

    `bias` is for all of them. `gelu` is exact, `gelu_tanh` its approximation by tanh, `gelu_sigmoid` x sigmoid(1.702 x)
    (https://arxiv.org/abs/1606.08415); `relu_squared` https://arxiv.org/abs/2109.08668; `xielu`, of a plain MLP, has
    two numbers of its own in every layer (https://arxiv.org/abs/2411.13010).

    With a `limit` other than 0 a gate is bounded to it from above, and what it is multiplied with from both sides;
    `plus_one` is added to the latter (https://arxiv.org/abs/2508.10925 section 2.2). Both are for experts too.
    """

    kind: str
    activation: str
    bias: bool = False
    limit: float = 0.0
    plus_one: bool = False


@dataclass(frozen=True)
class Experts:
    """In `layers` (indices from 0, ascending) `count` gated MLPs of width `ffn` stand in place of the one of sizes.ffn.

    A token goes through the `used` ones that the matrix router scores highest, and takes the weighted sum of what they
    give (https://arxiv.org/abs/2101.03961). By `routing`, the scores are the softmax of the router's numbers
    ("softmax"), their sigmoids ("sigmoid"), or the numbers themselves, the weights the softmax of those of the chosen
    ("softmax_of_chosen", which is what "softmax" with `renormalize` computes too) or their sigmoids
    ("sigmoid_of_chosen"). Weights are the scores, made to sum to 1 where `renormalize`, times `scale`. `bias` is added
    to the scores to choose, not to weigh; `product_bias` to the router's numbers; `biases` are those of the experts.
    "sparse_mixer": an expert's weight is its softmax among those not chosen yet whose numbers are less than twice
    `tolerance` below, relative to themselves (https://arxiv.org/abs/2409.12136).

    With `groups` above 1 only experts of the `groups_used` best groups are chosen: neighbours make a group, which is as
    good as its best expert, or for "sigmoid" its best two together (https://arxiv.org/abs/2412.19437 section 2.1.2).

    `shared_ffn`: every token also goes through an MLP of that width, 0 for none (https://arxiv.org/abs/2401.06066);
    with `shared_gate` what it gives is multiplied by the sigmoid of one more row's product with the token. `norm`: what
    all of them together give is normed, in these layers only.
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
    product_bias: bool = False
    biases: bool = False
    tolerance: float = 0.0
    norm: bool = False


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
    matrix, with a bias where `transform_bias`, the MLP's activation and a norm (https://arxiv.org/abs/1810.04805, of
    masked language models).
    Logits are multiplied by `scale`, then `soft_cap` c makes them c tanh(logit / c).
    """

    tied: bool
    kind: str = "logits"
    transform: bool = False
    transform_bias: bool = True
    bias: bool = False
    scale: float = 1.0
    soft_cap: float = 0.0


@dataclass(frozen=True)
class Pooling:
    """How an encoder's outputs of a text's tokens become one vector: their `mean`, the `first` or the `last` one.

    `normalize`: divided by its length. `tokens`: the longest text that it was made for, 0 for sizes.context.
    """

    kind: str
    normalize: bool = False
    tokens: int = 0


@dataclass(frozen=True)
class Encoder:
    """Another stack of `layers`, which reads a source text as a whole; the model's own layers write the answer to it.

    Between attention and MLP, each of the model's layers also attends to what the encoder makes of the source, by
    matrices cross_q, cross_k, cross_v and cross_o, without positions (https://arxiv.org/abs/1706.03762 section 3.2.3).
    An encoder's layer is built as one of the model's, without that, and nothing in it is causal; its MLP is `ffn` wide.
    `own_embedding`: it has a table of its own; else it looks up in the model's.
    """

    layers: int
    ffn: int
    own_embedding: bool = False


@dataclass(frozen=True)
class Tokens:
    """Ids with a meaning. `add_bos`: a text starts with `bos`. Any of `eos` ends the answer.

    `end`: what an encoder's text ends with. `start`: where a model has an encoder, the first token of the answer, which
    is not part of it; `forced`: what then follows, whatever the model says. `suppressed`: what such a model never says,
    as the padding that Marian's tables have no number for.
    """

    bos: int | None
    eos: tuple[int, ...]
    add_bos: bool
    end: int | None = None
    start: int | None = None
    forced: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
