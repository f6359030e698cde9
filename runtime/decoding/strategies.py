"""The names of strategies, and the parameters each stands for.

They are those of Inferflow (https://arxiv.org/abs/2401.08294), which every one begins with the 50 likeliest tokens, and
its older spellings with "sample." before them. "sample" is all tokens, unless other options say which.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_POOL = 50  # likeliest tokens that the seed's strategies look at
_FSD = {"top_k": _POOL, "fsd_k": 6, "fsd_alpha": 0.5, "fsd_n": 3, "fsd_beta": 0.9}


@dataclass(frozen=True)
class Strategy:
    """How the token is taken from the candidates, and options with the values they have unless they are given."""

    kind: str  # "greedy", "sample", "mirostat", "fsd" or "random_fsd"
    defaults: dict[str, float] = field(default_factory=dict)


_STD = Strategy("sample", {"top_k": _POOL, "top_p": 0.9, "max_k": 8})
_TOP_K = Strategy("sample", {"top_k": _POOL, "max_k": 8})
_GREEDY = Strategy("greedy")
_PLAIN_FSD = Strategy("fsd", _FSD)
_RANDOM_FSD = Strategy(
    "random_fsd", {**_FSD, "top_p": 0.93, "max_k": 8, "fsd_random_tokens": 10, "fsd_random_share": 0.5}
)

STRATEGIES: dict[str, Strategy] = {
    "greedy": _GREEDY,
    "sample": Strategy("sample"),
    "top_k": _TOP_K,
    "top_p": _STD,
    "min_p": Strategy("sample", {"top_k": _POOL, "min_p": 0.05}),
    "typical": Strategy("sample", {"top_k": _POOL, "typical_p": 0.95}),
    "tfs": Strategy("sample", {"top_k": _POOL, "tail_free": 0.95}),
    "mirostat": Strategy("mirostat", {"top_k": _POOL, "mirostat_tau": 5.0, "mirostat_eta": 0.1}),
    "fsd": _PLAIN_FSD,
    "random_fsd": _RANDOM_FSD,
    "sample.std": _STD,
    "sample.top_p": _STD,
    "sample.top_k": _TOP_K,
    "sample.greedy": _GREEDY,
    "sample.fsd": _PLAIN_FSD,
    "sample.random_fsd": _RANDOM_FSD,
}

# The parameters that only one kind of strategy has.
OWN: dict[str, tuple[str, ...]] = {
    "mirostat_tau": ("mirostat",),
    "mirostat_eta": ("mirostat",),
    "fsd_k": ("fsd", "random_fsd"),
    "fsd_alpha": ("fsd", "random_fsd"),
    "fsd_n": ("fsd", "random_fsd"),
    "fsd_beta": ("fsd", "random_fsd"),
    "fsd_random_tokens": ("random_fsd",),
    "fsd_random_share": ("random_fsd",),
}
