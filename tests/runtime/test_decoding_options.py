"""Options: what is refused, all at once and by name, and what the strategies' names stand for."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.strategies import STRATEGIES
from llmc.runtime.errors import RequestError

NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 2**63, 1.5, "9", None, True, NAN],
    "temperature": [NAN, INF, -0.1, 1e9, 10**400, "1", True],
    "top_k": [-1, 2**63, 1.5, 10**5000],
    "top_p": [0, 1.1, NAN, -1],
    "seed": [-1, 2**64, "x"],
    "ignore_eos": [None, 1, "yes"],
    "prefill_chunk": [0, -1, 2**63, 1.5, "9", True],
    "strategy": ["beam", 3, None],
    "min_p": [-0.1, 1.1, NAN],
    "typical_p": [0, 1.1],
    "tail_free": [0, 1.1],
    "max_k": [0, 1.5],
    "mirostat_tau": [0, 101],
    "mirostat_eta": [0, 1.1],
    "fsd_k": [0, 1001],
    "fsd_alpha": [-0.1, 1.1],
    "fsd_n": [0, 17],
    "fsd_beta": [-0.1, 1.1],
    "fsd_random_tokens": [-1, 0.5],
    "fsd_random_share": [-0.1, 1.1],
    "repetition_penalty": [0, 101, NAN, None],
    "presence_penalty": [-101, INF],
    "frequency_penalty": [101, "1"],
    "logit_bias": [{-1: 1.0}, {1: NAN}, {1: 1e5}, {"1": 1.0}, [(1, 1.0), (1, 2.0)], 5, "ab", {1: None}],
    "banned": [[-1], [1.5], 7, ["a"], [True]],
    "min_tokens": [-1, 257],
    "stop": ["", ["a", ""], [1], 5, "x" * 1001, ["x"] * 65],
    "json_schema": [7, [], "{", "7", "[" * 100_000],
    "regex": [7, "x" * (1 << 21)],
    "lark": [7, ["start"]],
    "n": [0, 1025, 2],
    "logprobs": [-1, 65, True],
    "beams": [0, 65],
    "length_penalty": [-101, NAN, 1.0],
    "early_stopping": ["maybe", True, "yes"],
    "endless": ["ring", None],
    "n_keep": [-1, 4],
    "n_discard": [0, 4],
    "window": [0, 4],
    "prediction": [7, ["a"], "x" * (1 << 21)],
}


def test_every_option_has_bad_values_here() -> None:
    assert sorted(BAD) == sorted(f.name for f in fields(Options) if f.init)


@pytest.mark.parametrize("name", BAD)
def test_values_are_checked(name: str) -> None:
    for bad in BAD[name]:
        with pytest.raises(RequestError, match=f"^{name}: ") as caught:
            Options(**{name: bad})
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        Options(temperature=-1, top_k=-1, stop=[""], banned=[-1], early_stopping="maybe")
    told = str(caught.value).split("; ")
    assert [each.partition(":")[0] for each in told] == ["temperature", "top_k", "early_stopping", "banned", "stop"]


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(
        RequestError, match="'tempurature' is no option; did you mean temperature.; 'zzz' is no option$"
    ):
        Options.of({"tempurature": 1, "zzz": 2, "top_k": 3})
    with pytest.raises(RequestError, match="'kind' is no option"):
        Options.of({"kind": "greedy"})
    with pytest.raises(RequestError, match="'zzz' is no option; top_k: got -1, wanted .*; n: got 0"):
        Options.of({"zzz": 2, "top_k": -1, "n": 0})
    assert Options.of({"top_k": 3}) == Options(top_k=3)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"min_p": 0.1}, "min_p: it needs a temperature"),
        ({"max_k": 4, "temperature": 0}, "max_k: it needs a temperature"),
        ({"strategy": "greedy", "temperature": 0.5}, "temperature: strategy greedy takes"),
        ({"strategy": "typical", "temperature": 0}, "temperature: 0 takes"),
        ({"fsd_k": 3, "temperature": 1.0}, "fsd_k: it is of strategy fsd and random_fsd, and this one is sample"),
        ({"strategy": "fsd", "fsd_random_share": 0.1}, "fsd_random_share: it is of strategy random_fsd"),
        ({"strategy": "tfs", "mirostat_tau": 3}, "mirostat_tau: it is of strategy mirostat, and this one is tfs"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 are more than max_tokens"),
        ({"beams": 2, "temperature": 1.0}, "beams: a search does not go with a strategy that samples"),
        ({"beams": 2, "logprobs": 0}, "beams: a search does not go with logprobs"),
        ({"beams": 2, "stop": "a"}, "beams: a search does not go with stop"),
        ({"beams": 2, "endless": "sinks"}, "beams: a search does not go with endless"),
        ({"beams": 2, "n": 3}, r"beams: a search does not go with n above it \(3\)"),
        ({"n": 2}, "n: 2 answers without chance are the same"),
        ({"n": 2, "strategy": "fsd"}, "n: 2 answers without chance are the same"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        Options(**options)


def test_what_the_names_of_strategies_stand_for() -> None:
    assert (Options().kind, Options(top_k=5, top_p=0.5).kind, Options(temperature=0).kind) == ("greedy",) * 3
    assert Options(temperature=0.7).kind == "sample"
    for name in ("sample.std", "sample.top_p", "top_p"):
        options = Options(strategy=name)
        assert (options.kind, options.temperature, options.top_k) == ("sample", 1.0, 50)
        assert (options.top_p, options.max_k) == (0.9, 8)
    assert Options(strategy="sample.top_k").top_p is None
    assert Options(strategy="min_p").min_p == 0.05
    assert Options(strategy="tfs").tail_free == 0.95
    assert Options(strategy="typical").typical_p == 0.95
    mirostat = Options(strategy="mirostat")
    assert (mirostat.mirostat_tau, mirostat.mirostat_eta) == (5.0, 0.1)
    fsd = Options(strategy="random_fsd")
    assert (fsd.fsd_k, fsd.fsd_alpha, fsd.fsd_n, fsd.fsd_beta) == (6, 0.5, 3, 0.9)
    assert (fsd.top_p, fsd.max_k, fsd.fsd_random_tokens, fsd.fsd_random_share) == (0.93, 8, 10, 0.5)
    given = Options(strategy="sample.std", top_p=0.5, top_k=0, temperature=2.0)
    assert (given.top_p, given.top_k, given.max_k, given.temperature) == (0.5, 0, 8, 2.0)
    assert all(Options(strategy=name).kind == strategy.kind for name, strategy in STRATEGIES.items())


def test_the_page_has_every_option_and_what_every_name_stands_for(root: Path) -> None:
    page = (root / "docs" / "decoding.md").read_text(encoding="utf-8")
    assert [f.name for f in fields(Options) if f.init and f"`{f.name}`" not in page] == []
    table = page.partition("## Strategies")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    for name, strategy in STRATEGIES.items():
        (row,) = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        defaults = strategy.defaults if name not in ("random_fsd", "sample.random_fsd") else {"top_p": 0.93, "max_k": 8}
        assert all(f"`{key}` {value:g}" in row for key, value in defaults.items()), name


def test_lists_are_taken_as_they_come_and_options_can_be_keys() -> None:
    options = Options(stop="end", banned=range(3), logit_bias={5: 1}, strategy="top_p", seed=1)
    assert (options.stop, options.banned, options.logit_bias) == (("end",), (0, 1, 2), ((5, 1.0),))
    assert options.with_seed(2) == Options(
        stop=["end", "end"], banned=(0, 1, 2), logit_bias=[(5, 1.0)], strategy="top_p", seed=2
    )
    assert len({options, options.with_seed(1), options.with_seed(2)}) == 2
    assert Options(endless="sinks").n_keep == 4
