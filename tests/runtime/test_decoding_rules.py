"""What each sampling rule leaves, against its definition in float64; and the step's likeliest against the whole row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from llmc.runtime.decoding.candidates import Row, candidates_of_all, candidates_of_top
from llmc.runtime.decoding.chain import kept, probabilities
from llmc.runtime.decoding.chooser import Chooser
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.penalties import Penalties

Logits = NDArray[np.float32]
EXTREME = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-30, 30, width=32))
SMALL = st.builds(
    lambda size, seed, scale: (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32),
    st.integers(1, 60),
    st.integers(0, 2**32),
    st.sampled_from([0.1, 1.0, 3.0, 10.0]),
)
# Many sizes of vocabulary, many kinds of heads and tails.
ROWS = st.builds(
    lambda size, seed, scale: (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32),
    st.sampled_from([5, 40, 700, 4000]),
    st.integers(0, 2**32),
    st.sampled_from([0.01, 1.0, 2.0, 4.0, 12.0]),
)
SHARES = st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99])
RULES = st.fixed_dictionaries(
    {"temperature": st.floats(0.05, 5)},
    optional={
        "top_k": st.sampled_from([0, 1, 3, 8, 50, 90]),
        "top_p": SHARES | st.just(1.0),
        "min_p": SHARES | st.just(1.0),
        "typical_p": SHARES | st.just(1.0),
        "tail_free": SHARES | st.just(1.0),
        "max_k": st.sampled_from([1, 4, 10]),
    },
)


def definition(logits: NDArray[Any], options: Options) -> dict[int, float]:
    """Tokens and probabilities, rule by rule and token by token."""
    left = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[: options.top_k or None]

    def now() -> dict[int, float]:
        most = max(float(logits[i]) for i in left)
        weight = {i: math.exp((float(logits[i]) - most) / (options.temperature or 1.0)) for i in left}
        return {i: weight[i] / math.fsum(weight.values()) for i in left}

    if options.top_p is not None and options.top_p < 1:
        left = fewest(left, now(), options.top_p)
    if options.min_p is not None:
        left = [i for i in left if now()[i] >= options.min_p * now()[left[0]]]
    if options.typical_p is not None and options.typical_p < 1:
        p = now()
        entropy = math.fsum(-p[i] * math.log(p[i]) for i in left if p[i])
        near = sorted(left, key=lambda i: abs(-math.log(p[i]) - entropy) if p[i] else math.inf)
        stay = fewest(near, p, options.typical_p)
        left = [i for i in left if i in stay]
    if options.tail_free is not None and options.tail_free < 1 and len(left) > 2:
        p = now()
        curve = [p[i] for i in left]
        bends = [abs(curve[i] - 2 * curve[i + 1] + curve[i + 2]) for i in range(len(left) - 2)]
        share = math.fsum(bends) * options.tail_free
        end = next((i for i in range(len(bends)) if math.fsum(bends[: i + 1]) > share), None)
        left = left if end is None else left[: end + 1]
    left = left[: options.max_k]
    return now()


def fewest(order: list[int], p: dict[int, float], share: float) -> list[int]:
    reached = 0.0
    for count, i in enumerate(order):
        reached += p[i]
        if reached >= share:
            return order[: count + 1]
    return order


def none(vocab: int) -> Penalties:
    return Penalties(Options(), (), vocab, (), ())


@settings(max_examples=180, deadline=None)
@given(SMALL | EXTREME, RULES)
@example(np.zeros(9, np.float32), {"temperature": 1.0, "tail_free": 0.5})
@example(np.zeros(8, np.float32), {"temperature": 1.0, "typical_p": 0.5})
def test_each_rule_leaves_what_its_definition_says(logits: Logits, rules: dict[str, Any]) -> None:
    options = Options(**rules)
    left = kept(candidates_of_all(Row.of(logits), none(logits.size), logits.size, options.temperature or 1.0), options)
    assert left is not None
    wanted = definition(logits, options)
    found = dict(zip(left.ids.tolist(), probabilities(left, options.temperature or 1.0).tolist(), strict=True))
    if wanted.keys() != found.keys():
        # Sums that meet a bound to the last bit, and surprises as near as each other, may go either way.
        assume(not _on_the_edge(logits, rules))
    assert wanted.keys() == found.keys()
    for token, probability in wanted.items():
        assert found[token] == pytest.approx(probability, abs=1e-12)


def _on_the_edge(logits: Logits, rules: dict[str, Any]) -> bool:
    """Whether bounds a little lower or higher leave something else, or tokens are as likely as each other."""
    names = ("top_p", "min_p", "typical_p", "tail_free")
    near = [{n: min(1.0, v * f) if n in names else v for n, v in rules.items()} for f in (1 - 1e-9, 1.0, 1 + 1e-9)]
    twins = len(set(np.round(logits, 3).tolist())) < logits.size
    return twins or len({tuple(definition(logits, Options(**each))) for each in near}) > 1


@settings(max_examples=180, deadline=None)
@given(ROWS, RULES, st.sampled_from([3, 8, 64]))
def test_the_likeliest_are_enough_or_it_says_so(logits: Logits, rules: dict[str, Any], top: int) -> None:
    options = Options(**rules)
    row, temperature = Row.of(logits, top), options.temperature or 1.0
    everything = candidates_of_all(row, none(logits.size), logits.size, temperature)
    wanted = kept(everything, options)
    assert wanted is not None
    for some in (
        candidates_of_top(row, none(logits.size), temperature),
        candidates_of_all(row, none(logits.size), 20, temperature),
    ):
        left = kept(some, options)
        if left is not None:
            assert left.ids.tolist() == wanted.ids.tolist()
            assert left.logits.tobytes() == wanted.logits.tobytes()


def test_edges() -> None:
    def left(logits: Logits, **rules: Any) -> tuple[list[int], list[float]]:
        options = Options(**rules)
        assert options.temperature is not None
        found = kept(candidates_of_all(Row.of(logits), none(logits.size), logits.size, options.temperature), options)
        assert found is not None
        return found.ids.tolist(), probabilities(found, options.temperature).tolist()

    twins = np.array([0, 1, np.float32(-np.inf), 1], np.float32)
    assert left(twins, temperature=1.0, top_k=1)[0] == [1]
    assert left(twins, temperature=1e-300) == ([1, 3, 0], [0.5, 0.5, 0.0])
    assert left(twins, temperature=1.0, top_p=1e-300)[0] == [1]
    assert left(twins, temperature=1.0, top_k=2**31 - 1)[0] == [1, 3, 0]
    for rules in ({"top_p": 0.2}, {"typical_p": 0.2}, {"tail_free": 0.2}, {"min_p": 1.0}, {"top_k": 5}, {"max_k": 5}):
        assert left(np.ones(1, np.float32), temperature=3.0, **rules) == ([0], [1.0])
    for temperature in (1e-300, 5e-324, 1e4):
        for rules in ({"top_p": 0.5}, {"min_p": 0.5}, {}):
            some = candidates_of_top(Row.of(np.arange(90, dtype=np.float32), 5), none(90), temperature)
            kept(some, Options(temperature=temperature, **rules))  # no overflow, no division by zero


def test_the_likeliest_are_mostly_enough() -> None:
    """Otherwise the test above says nothing. 32,000 tokens, 40 logits well above the others, as of a sure model."""
    random = np.random.default_rng(0)
    logits = random.standard_normal(32_000).astype(np.float32)
    logits[random.choice(32_000, 40)] += 14
    top = Row.of(logits)
    for rules in (
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "top_p": 0.95, "typical_p": 0.9, "tail_free": 0.9, "max_k": 9},
        {"temperature": 1.0, "max_k": 40},
        {"strategy": "typical"},
        {"strategy": "tfs"},
    ):
        options = Options(**rules)  # type: ignore[arg-type]
        left = kept(candidates_of_top(top, none(32_000), options.temperature or 1.0), options)
        assert left is not None, rules
    assert kept(candidates_of_top(top, none(32_000)), Options(temperature=1.0, typical_p=0.9)) is None
    assert kept(candidates_of_top(top, none(32_000)), Options(temperature=1.0, top_k=65)) is None


@settings(max_examples=120, deadline=None)
@given(ROWS, st.sampled_from([0.2, 0.7, 1.0, 1.5, 4.0]), st.sampled_from([3, 64]), st.data())
def test_the_weight_of_the_others_is_within_its_bounds(
    logits: Logits, temperature: float, top: int, data: st.DataObject
) -> None:
    some = st.lists(st.integers(0, logits.size - 1), max_size=4, unique=True)
    options = Options(logit_bias={id_: data.draw(st.sampled_from([-30, -1, 2, 30])) for id_ in data.draw(some)})
    penalties = Penalties(options, (), logits.size, (), ())
    found = candidates_of_top(Row.of(logits, top), penalties, temperature)
    assume(found.ids.size > 0)
    everything = candidates_of_all(Row.of(logits, top), penalties, logits.size, temperature)
    assert everything.ids[: found.ids.size].tolist() == found.ids.tolist()
    weight = np.exp((everything.logits - everything.logits[0]) / temperature)
    others = weight[found.ids.size :].sum()
    assert found.least <= others * (1 + 1e-9)
    assert others * (1 - 1e-9) <= found.most


@settings(max_examples=120, deadline=None)
@given(ROWS, st.integers(0, 2**32), st.sampled_from([3, 8, 64]))
def test_a_choice_is_the_same_from_the_likeliest_and_from_the_whole_row(logits: Logits, seed: int, top: int) -> None:
    random = np.random.default_rng(seed)
    names = ["", "sample", "top_k", "top_p", "min_p", "tfs", "typical", "mirostat", "fsd", "random_fsd"]
    rules: dict[str, Any] = {"strategy": str(random.choice(names)), "seed": seed}
    if rules["strategy"] and random.random() < 0.5:
        rules["top_k"] = int(random.choice([0, 2, 70]))
    if random.random() < 0.5:
        rules |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "min_tokens": 2}
    if random.random() < 0.3:
        picked = random.integers(0, logits.size, 3).tolist()
        rules["logit_bias"] = dict(zip(picked, [5.0, -5.0, 1e4], strict=True))
        rules["banned"] = np.argsort(logits)[-2:].tolist()
    prompt = random.integers(0, logits.size, 30).tolist()
    options = Options(**rules)
    few, whole = (Chooser(options, prompt, logits.size, (int(np.argmax(logits)),)) for _ in range(2))
    for step in range(4):
        now = np.roll(logits, step * 7)
        some = Row.of(now, top)
        some = replace(some, normalizer=some.normalizer + float(random.choice([-9e-6, 0, 9e-6])))  # as float32 gives it
        one, other = few.choose(some), whole.choose(Row.of(now, now.size))
        assert one.token == other.token
        few.accept(one)
        whole.accept(other)
