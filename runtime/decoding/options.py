"""What can be asked of a generation: one flat set of options, checked all at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llmc.runtime.decoding.ranges import MAX_INT32, MAX_LOGPROBS, Number, Words, shown
from llmc.runtime.decoding.strategies import OWN, STRATEGIES
from llmc.runtime.errors import RequestError

_ENDLESS = ("", "sinks", "shift", "reevaluate")
_N_KEEP = 4  # first tokens that endless text keeps: https://arxiv.org/abs/2309.17453 section 3.1
_MAX_STOPS, _MAX_STOP_CHARS = 64, 1000
_MAX_TOKENS_LISTED = 2**20  # of logit_bias and banned
_MAX_BIAS = 1e4
_MAX_CHARS = 1 << 20  # of a grammar or a prediction

# Field -> what its value may be. None is allowed for those whose default is None.
RANGES: dict[str, Number | Words] = {
    "max_tokens": Number(1, MAX_INT32, whole=True),
    "temperature": Number(0, 1e4),
    "top_k": Number(0, MAX_INT32, whole=True),
    "top_p": Number(0, 1, above=True),
    "seed": Number(0, 2**64 - 1, whole=True),
    "prefill_chunk": Number(1, MAX_INT32, whole=True),
    "strategy": Words(("", *STRATEGIES)),
    "min_p": Number(0, 1),
    "typical_p": Number(0, 1, above=True),
    "tail_free": Number(0, 1, above=True),
    "max_k": Number(1, MAX_INT32, whole=True),
    "mirostat_tau": Number(0, 100, above=True),
    "mirostat_eta": Number(0, 1, above=True),
    "fsd_k": Number(1, 1000, whole=True),
    "fsd_alpha": Number(0, 1),
    "fsd_n": Number(1, 16, whole=True),
    "fsd_beta": Number(0, 1),
    "fsd_random_tokens": Number(0, MAX_INT32, whole=True),
    "fsd_random_share": Number(0, 1),
    "repetition_penalty": Number(0.01, 100),
    "presence_penalty": Number(-100, 100),
    "frequency_penalty": Number(-100, 100),
    "min_tokens": Number(0, MAX_INT32, whole=True),
    "n": Number(1, 1024, whole=True),
    "logprobs": Number(0, MAX_LOGPROBS, whole=True),
    "beams": Number(1, 64, whole=True),
    "length_penalty": Number(-100, 100),
    "early_stopping": Words(("no", "yes", "never")),
    "endless": Words(_ENDLESS),
    "n_keep": Number(0, MAX_INT32, whole=True),
    "n_discard": Number(1, MAX_INT32, whole=True),
    "window": Number(1, MAX_INT32, whole=True),
}
_FLAGS = ("ignore_eos",)
_FORMS = ("json_schema", "regex", "lark")
_CHANCE = ("min_p", "typical_p", "tail_free", "max_k")  # top_k and top_p without a temperature are let pass


@dataclass(frozen=True)
class Options:
    """What a generation can be asked for; docs/decoding.md explains each with its paper and its default.

    Length: max_tokens, tokens made at most; min_tokens, no end token before so many; ignore_eos, go on after an end
    token; stop, texts that end the answer and are not part of it. Choice: strategy, a name of `STRATEGIES`, which fills
    in what is None here; without one, temperature None or 0 takes the likeliest token, whatever top_k and top_p are.
    Sampling is temperature, then top_k, top_p, min_p, typical_p, tail_free and max_k in this order. Penalties:
    repetition_penalty (of the prompt's tokens too), presence_penalty and frequency_penalty (of the answer's);
    logit_bias, added to a token's logit; banned, never chosen. Form: json_schema (a mapping, true for any JSON, or the
    text of either), regex or lark (a grammar), one of them, which the whole answer matches. Answers: n of them, sample
    i with seed + i; beams (1: no search) with length_penalty and early_stopping ("no", "yes", "never"). logprobs: so
    many of each step's likeliest tokens with their log-probabilities, from the logits as the model gave them.
    prefill_chunk: rows of a step at most while the prompt is read; None for the model's default. endless, n_keep,
    n_discard, window: text longer than the cache (docs/endless.md). prediction: a text that much of the answer may be
    like, which drafts are guessed by; it changes speed alone. Raises RequestError naming every value out of range
    and every contradiction.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    ignore_eos: bool = False
    prefill_chunk: int | None = None
    strategy: str = ""
    min_p: float | None = None
    typical_p: float | None = None
    tail_free: float | None = None
    max_k: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    fsd_k: int | None = None
    fsd_alpha: float | None = None
    fsd_n: int | None = None
    fsd_beta: float | None = None
    fsd_random_tokens: int | None = None
    fsd_random_share: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned: Iterable[int] = ()
    min_tokens: int = 0
    stop: str | Iterable[str] = ()
    json_schema: Any = None
    regex: str | None = None
    lark: str | None = None
    n: int = 1
    logprobs: int | None = None
    beams: int = 1
    length_penalty: float | None = None
    early_stopping: str | None = None
    endless: str = ""
    n_keep: int | None = None
    n_discard: int | None = None
    window: int | None = None
    prediction: str | None = None
    kind: str = field(init=False, repr=False)  # "greedy", "sample", "mirostat", "fsd" or "random_fsd"

    def __post_init__(self) -> None:
        optional = {f.name for f in fields(self) if f.default is None}
        faults = [
            fault
            for name, range_ in RANGES.items()
            if (value := getattr(self, name)) is not None or name not in optional
            if (fault := range_.fault(name, value))
        ]
        faults += [f"{name}: got {shown(value)}, wanted True or False" for name in _FLAGS
                   if not isinstance(value := getattr(self, name), bool)]  # fmt: skip
        faults += self._take_lists()
        if not faults:
            faults = self._take_strategy() + self._contradictions()
        if faults:
            raise RequestError("; ".join(faults))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Options from names and values. Raises RequestError also for names that are none, with the nearest that is."""
        known = [f.name for f in fields(cls) if f.init]
        faults = [f"{shown(name)} is no option{_near(name, known)}" for name in values if name not in known]
        try:
            options = cls(**{name: value for name, value in values.items() if name in known})
        except RequestError as error:
            faults.append(str(error))
        if faults:
            raise RequestError("; ".join(faults))
        return options

    @property
    def form(self) -> str | None:
        """The name of the option that says what form the answer has."""
        return next((name for name in _FORMS if getattr(self, name) is not None), None)

    def with_seed(self, seed: int | None) -> Options:
        """The same with another seed."""
        return replace(self, seed=seed)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, by itself or in a beam search."""
        return self.kind == "greedy"

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _take_lists(self) -> list[str]:
        """Turn logit_bias, banned and stop into tuples, json_schema into text; what is wrong with them."""
        faults = []
        taken = (("logit_bias", _biases), ("banned", _ids), ("stop", _stops), ("json_schema", _schema),
                 ("regex", _text), ("lark", _text), ("prediction", _text))  # fmt: skip
        for name, take in taken:
            try:
                self._set(name, take(getattr(self, name)))
            except (TypeError, ValueError) as error:
                faults.append(f"{name}: {error}")
        return faults

    def _take_strategy(self) -> list[str]:
        """Fill in what the strategy's name stands for; what does not go with it."""
        strategy = STRATEGIES.get(self.strategy)
        self._set("kind", strategy.kind if strategy else "sample" if self.temperature else "greedy")
        faults = [
            f"{name}: it is of strategy {' and '.join(kinds)}, and this one is {self.strategy or self.kind}"
            for name, kinds in OWN.items()
            if getattr(self, name) is not None and self.kind not in kinds
        ]
        if self.kind == "greedy":
            idle = [name for name in _CHANCE if getattr(self, name) is not None]
            faults += [f"{name}: it needs a temperature above 0, or a strategy that samples" for name in idle]
            if strategy and self.temperature:
                faults.append(f"temperature: strategy {self.strategy} takes the likeliest token; leave one of them out")
            return faults
        if self.temperature == 0:
            faults.append(f"temperature: 0 takes the likeliest token, and strategy {self.strategy} does not")
        for name, value in {"temperature": 1.0, **(strategy.defaults if strategy else {})}.items():
            if getattr(self, name) is None:
                self._set(name, value)
        return faults

    def _contradictions(self) -> list[str]:
        faults = []
        if self.min_tokens > self.max_tokens:
            faults.append(f"min_tokens: {self.min_tokens} are more than max_tokens, which is {self.max_tokens}")
        if self.beams > 1:
            clashes = {
                "a strategy that samples": self.kind != "greedy",
                "logprobs": self.logprobs is not None,
                "stop": bool(self.stop),
                "endless": bool(self.endless),
                f"n above it ({self.n})": self.n > self.beams,
            }
            faults += [f"beams: a search does not go with {name}" for name, clash in clashes.items() if clash]
        else:
            own = [name for name in ("length_penalty", "early_stopping") if getattr(self, name) is not None]
            faults += [f"{name}: it is of a beam search; give beams above 1" for name in own]
            if self.n > 1 and self.kind in ("greedy", "fsd"):
                faults.append(f"n: {self.n} answers without chance are the same; give a temperature, or beams")
        forms = [name for name in _FORMS if getattr(self, name) is not None]
        if len(forms) > 1:
            faults.append(f"{', '.join(forms)}: an answer has one form; give one of them")
        if forms:
            clashes = {"beams": self.beams > 1, "min_tokens": self.min_tokens > 0, "ignore_eos": self.ignore_eos}
            faults += [f"{forms[0]}: it says when an answer ends, and does not go with {name}"
                       for name, clash in clashes.items() if clash]  # fmt: skip
        if self.endless:
            self._set("n_keep", _N_KEEP if self.n_keep is None else self.n_keep)
        else:
            own = [name for name in ("n_keep", "n_discard", "window") if getattr(self, name) is not None]
            faults += [f"{name}: it is of endless text; give endless" for name in own]
        return faults


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = tuple(value.items() if isinstance(value, Mapping) else value)
    ids = _ids(id_ for id_, _ in pairs)
    if len(set(ids)) != len(ids):
        raise ValueError("a token is in it twice")
    wrong = [fault for id_, bias in pairs if (fault := Number(-_MAX_BIAS, _MAX_BIAS).fault(f"token {id_}", bias))]
    if wrong:
        raise ValueError(wrong[0])
    return tuple((id_, float(bias)) for id_, (_, bias) in zip(ids, pairs, strict=True))


def _ids(value: Any) -> tuple[int, ...]:
    ids = tuple(value)
    if len(ids) > _MAX_TOKENS_LISTED:
        raise ValueError(f"it has {len(ids)} tokens, and at most {_MAX_TOKENS_LISTED} are read")
    wrong = [fault for id_ in ids if (fault := Number(0, MAX_INT32, whole=True).fault("token id", id_))]
    if wrong:
        raise ValueError(wrong[0])
    return tuple(int(id_) for id_ in ids)


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > _MAX_STOPS:
        raise ValueError(f"it has {len(stops)} texts, and at most {_MAX_STOPS} are looked for")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _MAX_STOP_CHARS:
            raise ValueError(f"got {shown(stop)}, wanted texts of 1..{_MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _schema(value: Any) -> str | None:
    """The schema as text."""
    if value is None:
        return None
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if isinstance(schema, Mapping | bool):
            return _text(json.dumps(schema, default=dict))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    raise ValueError(f"got {shown(value)}, wanted a JSON schema: an object, or true for any JSON")


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"got {shown(value)}, wanted a text")
    if len(value) > _MAX_CHARS:
        raise ValueError(f"it has {len(value)} characters, and at most {_MAX_CHARS} are read")
    return value


def _near(name: object, known: list[str]) -> str:
    import difflib  # for the wrong ones only

    close = difflib.get_close_matches(str(name)[:40], known, 1)
    return f"; did you mean {close[0]}?" if close else ""
