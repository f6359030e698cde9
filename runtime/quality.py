"""How well a model predicts a text: perplexity, and how far its next-token distributions are from another model's.

Perplexity as the literature reports it: the text is tokenized once and cut into disjoint windows; the first token of a
window is context only; exp of the mean negative log-likelihood of all others. Windows of 512 tokens are what
https://github.com/inferflow/inferflow (src/tools/perplexity.cc) uses. Beside it stands what `llama-perplexity
--kl-divergence` of llama.cpp reports: the Kullback-Leibler divergence at every scored token, and how often both models
think the same token likeliest.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import LlmcError, RequestError
from llmc.runtime.loading.integrity import Progress
from llmc.runtime.runner import Feed, Ids, Output, Runner, as_ids
from llmc.runtime.text.tokenizer import Tokenizer

WINDOW = 512
_ROWS = 128  # logit rows held at once, of each model: 134 MB where the vocabulary is 262,144
_BLOCK = 2**16  # logits handled at once, so that the passes over them stay in a core's cache
_MOST_NLL = 500.0  # nats; exp of more is near the end of what a float64 holds

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Subject:
    """A model as far as an evaluation needs it. `bos` is its first token, if it has one."""

    runner: Runner
    tokenizer: Tokenizer
    bos: int | None
    add_bos: bool


@dataclass(frozen=True)
class Comparison:
    """The other model P at every scored token, and how this one, Q, differs: arrays (tokens,).

    nll: P's negative log-likelihood, nats. kl: KL(P || Q), nats. same: whether P and Q think the same token likeliest.
    """

    nll: Scores
    kl: Scores
    same: NDArray[np.bool_]


@dataclass(frozen=True)
class Evaluation:
    """What `Model.evaluate` found. nll: (tokens,) negative log-likelihood of every scored token, nats.

    text_tokens: tokens of the whole text, scored or not. bos: whether each window began with the model's first token.
    """

    nll: Scores
    text_tokens: int
    window: int
    windows: int
    bos: bool
    seconds: float
    against: Comparison | None = None

    @property
    def tokens(self) -> int:
        """How many tokens were scored."""
        return len(self.nll)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll.mean())

    def figures(self) -> dict[str, Any]:
        """Every figure by name, as plain numbers; `kl` and `top1_agreement` are None without `against`.

        Standard errors take tokens as independent, and are None for a single token.
        """
        error = _standard_error(self.nll)
        found = {
            "perplexity": self.perplexity,
            "perplexity_standard_error": error and self.perplexity * error,
            "tokens": self.tokens,
            "text_tokens": self.text_tokens,
            "window": self.window,
            "windows": self.windows,
            "bos": self.bos,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "kl": None,
            "top1_agreement": None,
        }
        if self.against is None:
            return found
        nll, kl, same = self.against.nll, self.against.kl, self.against.same
        other, other_error = math.exp(nll.mean()), _standard_error(nll)
        ratio = math.exp((self.nll - nll).mean())
        error = _standard_error(self.nll - nll)  # of the pairs: what both find hard cancels out
        return found | {
            "kl": float(kl.mean()),
            "kl_standard_error": _standard_error(kl),
            "kl_median": float(np.median(kl)),
            "kl_99_percent": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            "top1_agreement": float(same.mean()),
            "top1_standard_error": _standard_error(same),
            "against_perplexity": other,
            "against_perplexity_standard_error": other_error and other * other_error,
            "perplexity_ratio": ratio,
            "perplexity_ratio_standard_error": error and ratio * error,
        }


def evaluate(
    subject: Subject,
    text: str | Ids,
    window: int = WINDOW,
    against: Subject | None = None,
    most_windows: int | None = None,
    bos: str = "auto",
    progress: Progress | None = None,
) -> Evaluation:
    """Score `text`, a text or its token ids, in windows of `window` tokens, the first `most_windows` of them.

    bos: "yes" puts the model's first token in front of each window, in place of a token of text, "no" does not; "auto"
    does as the model does for a prompt. `against` reads the same tokens. progress("score", done, total) is called
    before each window and at the end. Raises RequestError, and LlmcError where a model computes what is no number.
    """
    first = _first_token(subject, bos)
    if most_windows is not None and (not isinstance(most_windows, Integral) or most_windows < 1):
        raise RequestError(f"windows: got {most_windows!r}, wanted a positive whole number")
    _check_window("window", window, subject.runner)
    if against is not None:
        _check_comparable(subject, against)
        _check_window("against: window", window, against.runner)
    ids = subject.tokenizer.encode(text, bos=False) if isinstance(text, str) else text
    tokens = as_ids(ids, subject.runner.vocab)
    rows = windows(tokens, window, first)[:most_windows]
    start = time.perf_counter()
    nll, comparison = score(subject.runner, rows, None if against is None else against.runner, progress)
    seconds = time.perf_counter() - start
    return Evaluation(nll, len(tokens), rows.shape[1], len(rows), first is not None, seconds, comparison)


def windows(ids: Ids, size: int, bos: int | None = None) -> NDArray[np.int32]:
    """(windows, size) token ids: `ids` cut into pieces, each after `bos` unless that is None.

    A last piece that is too short is dropped unless it is the only one. Raises RequestError.

    >>> windows([1, 2, 3, 4, 5], 2).tolist()
    [[1, 2], [3, 4]]
    >>> windows([1, 2, 3, 4, 5], 3, bos=0).tolist()
    [[0, 1, 2], [0, 3, 4]]
    >>> windows([1, 2, 3], 512).tolist()
    [[1, 2, 3]]
    """
    if size < 2:
        raise RequestError(f"window: got {size}, wanted at least 2 tokens: the first has nothing to be predicted from")
    tokens = np.asarray(ids, np.int32)
    if len(tokens) < 2:
        what = "it is empty" if len(tokens) == 0 else "it is 1 token"
        raise RequestError(f"text: {what}, wanted at least 2 tokens")
    taken = size - (bos is not None)
    count = len(tokens) // taken
    pieces = tokens[: count * taken].reshape(count, taken) if count else tokens[None]
    if bos is None:
        return pieces
    return np.concatenate([np.full((len(pieces), 1), bos, np.int32), pieces], axis=1)


def score(
    runner: Runner, rows: NDArray[np.int32], against: Runner | None = None, progress: Progress | None = None
) -> tuple[Scores, Comparison | None]:
    """Negative log-likelihood, nats, of every token of every window (W, S) but its first: (W * (S - 1),), in order.

    With `against` both models read each piece of a window in turn, so that few logits are held at a time.
    """
    runners = [runner] if against is None else [runner, against]
    step = min(_ROWS, *(each.prefill_chunk for each in runners))
    count, size = rows.shape
    nll = np.empty((len(runners), count, size - 1))
    kl = np.empty((count, size - 1))
    same = np.empty((count, size - 1), np.bool_)
    report = progress or (lambda stage, done, total: None)
    for number, ids in enumerate(rows):
        report("score", number, count)
        sequences = [each.new_sequence() for each in runners]
        try:
            for at in range(0, size - 1, step):
                part = slice(at, min(at + step, size - 1))
                feeds = [Feed(sequence, ids[part], "all") for sequence in sequences]
                outputs = [each.step([feed]) for each, feed in zip(runners, feeds, strict=True)]
                nll[:, number, part], kl[number, part] = score_rows(outputs, ids[at + 1 : part.stop + 1])
                same[number, part] = outputs[0].argmax == outputs[-1].argmax
                del outputs  # or the next step's logits would come on top of these
        finally:
            for each, sequence in zip(runners, sequences, strict=True):
                each.release(sequence)
        _check_finite(nll[:, number], kl[number], number)
    report("score", count, count)
    own = nll[0].reshape(-1)
    if against is None:
        return own, None
    return own, Comparison(nll[1].reshape(-1), kl.reshape(-1), same.reshape(-1))


def score_rows(outputs: list[Output], targets: Ids) -> tuple[Scores, Scores]:
    """nll (models, n) of tokens `targets` (n,) after logits (n, V) of each model; KL(last || first) (n,), nats.

    Differences and exponentials in float32, sums in float64. What is no number stays none: NaN or infinite.
    """
    count, vocab = outputs[0].logits.shape
    height = max(1, min(count, _BLOCK // vocab))
    scratch = np.empty((3, height, vocab), np.float32)
    nll, kl = np.empty((len(outputs), count)), np.zeros(count)
    places = np.asarray(targets)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        for top in range(0, count, height):
            block = slice(top, min(top + height, count))
            first, last, exps = scratch[:, : block.stop - top]
            logs = np.zeros(block.stop - top)
            for model, (output, shifted) in enumerate(zip(outputs, (first, last), strict=False)):
                best = np.take_along_axis(output.logits[block], output.argmax[block, None], 1)
                np.subtract(output.logits[block], best, out=shifted)  # at most 0, so exp cannot overflow
                sums = np.exp(shifted, out=exps).sum(-1, dtype=np.float64)
                nll[model, block] = np.log(sums) - np.take_along_axis(shifted, places[block], 1)[:, 0]
                logs = np.log(sums) - logs
            if len(outputs) > 1:
                # With P = exps / sums: sum P (log P - log Q), where log P - log Q = last - first - (log sums of each).
                np.subtract(last, first, out=first)
                np.multiply(first, exps, out=first)
                kl[block] = first.sum(-1, dtype=np.float64) / sums - logs
    return nll, np.maximum(kl, 0)  # it is never below 0, but for rounding; NaN passes through


def _first_token(subject: Subject, bos: str) -> int | None:
    if bos not in ("auto", "yes", "no"):
        raise RequestError(f"bos: got {bos!r}, wanted auto, yes or no")
    if bos == "no" or (bos == "auto" and not subject.add_bos):
        return None
    if subject.bos is None:
        raise RequestError("bos: this model has no first token to put in front of a window")
    return subject.bos


def _check_window(name: str, window: int, runner: Runner) -> None:
    if not isinstance(window, Integral) or isinstance(window, bool):
        raise RequestError(f"{name}: got {window!r}, wanted a whole number of tokens")
    if window > runner.context:
        raise RequestError(f"{name}: got {window} tokens, and the model's context is {runner.context}")


def _check_comparable(subject: Subject, against: Subject) -> None:
    mine, other = subject.runner.vocab, against.runner.vocab
    if mine != other:
        raise RequestError(
            f"against: that model has a vocabulary of {other} tokens, this one of {mine}; compare like with like"
        )
    if not subject.tokenizer.same_ids_as(against.tokenizer):
        raise RequestError("against: that model's tokenizer is another one: its ids do not stand for the same tokens")


def _check_finite(nll: Scores, kl: Scores, window: int) -> None:
    """`nll` (models, S - 1) and `kl` (S - 1,) of one window."""
    for name, values in (*zip(("", "against: "), nll, strict=False), ("", kl)):
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            raise LlmcError(
                f"{name}the model computed logits that are not finite at token {wrong[0] + 1} of window {window + 1}; "
                "its weights may be damaged or not fit its spec"
            )
        if values.mean() > _MOST_NLL:
            raise LlmcError(
                f"{name}the tokens of window {window + 1} are given probabilities below e^-{_MOST_NLL:.0f}; "
                "the model's weights may be damaged or not fit its spec"
            )


def _standard_error(values: NDArray[Any]) -> float | None:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
