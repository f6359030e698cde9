"""From what a user asks to a query: checks all that can be checked before any work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from llmc.runtime.cache.pages import pages_for
from llmc.runtime.decoding.chooser import Choice, Chooser
from llmc.runtime.decoding.options import Options
from llmc.runtime.decoding.stops import StopMatcher
from llmc.runtime.engine.query import Answer, Query
from llmc.runtime.engine.window import Window, window_of
from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import PAGE_TOKENS
from llmc.runtime.runner import Ids, Runner, as_ids
from llmc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.runtime.decoding.grammar import Grammar, Grammars

_ENDLESS_TOKENS = 2**31 - 1  # positions are int32


@dataclass(frozen=True)
class Intake:
    """Makes queries for a model. lead, suppressed, eos: as of the engine."""

    runner: Runner
    tokenizer: Tokenizer
    eos: frozenset[int]
    lead: tuple[int, ...]
    suppressed: tuple[int, ...]

    def query(
        self, id_: int, prompt: str | Ids, options: Options, source: Ids | None, choose: str,
        priority: int, user: str, salt: str,
    ) -> Query:  # fmt: skip
        """The query that `Engine.add_query` describes. Raises RequestError if it can never be served."""
        opening = self._ids(prompt)
        source_ids = None if source is None else self._ids(source)
        if self.runner.encode_function is None and source_ids is not None:
            raise RequestError("source: this model has no encoder")
        if self.runner.encode_function is not None and source_ids is None:
            opening, source_ids = list(self.lead), opening
            if not opening:
                raise RequestError("source: this model wants to be told a language, which its answer begins with: give "
                                   "that as the prompt, and the text's ids as source")  # fmt: skip
        if choose not in ("engine", "caller"):
            raise RequestError(f"choose: got {choose!r}, wanted engine or caller")
        if choose == "caller" and (options.n > 1 or options.beams > 1):
            raise RequestError("choose: a caller chooses the tokens of one answer; give neither n nor beams")
        prompt_ids = opening if source_ids is None else source_ids
        self._check_reads(opening, source_ids)
        window = window_of(options, self.runner)
        ends = frozenset() if options.ignore_eos else self.eos
        limit = self._limit(opening, source_ids, options, window)
        search = None
        grammar = self._grammar(options, choose)
        answers = [self._answer(options, opening, ends, window, sample, grammar) for sample in range(options.n)]
        if options.beams > 1:
            from llmc.runtime.decoding.beams import BeamSearch  # only a search needs it

            most = min(options.max_tokens, limit - len(opening))
            forced = 0 if source_ids is None else len(opening) - 1  # all but the token that every answer begins with
            search = BeamSearch.start(options, opening, self.runner.vocab, most, ends, self.suppressed, forced)
            answers = answers[:1]
        return Query(
            id_, options, prompt_ids, opening, source_ids, limit, answers, ends, by_caller=choose == "caller",
            priority=priority, user=user, salt=salt, search=search, prediction=self._prediction(options),
        )  # fmt: skip

    def text(self, id_: int, ids: Ids) -> Query:
        """An encoder's text, which is read whole. Raises RequestError if it is longer than the model reads."""
        whole = self._ids(ids)
        self._check_reads(whole, whole)
        if pages_for(len(whole)) > self.runner.pool.num_pages:
            raise RequestError(f"text: {len(whole)} tokens, and the cache has room for {self._cache_tokens}")
        answer = Answer(0, None, None, None)
        return Query(id_, Options(), whole, whole, None, len(whole), [answer], frozenset(), whole=True)

    @property
    def _cache_tokens(self) -> int:
        return self.runner.pool.num_pages * PAGE_TOKENS

    def _ids(self, prompt: str | Ids) -> list[int]:
        ids: list[int] = as_ids(
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, self.runner.vocab
        ).tolist()
        return ids

    def _check_reads(self, opening: list[int], source_ids: list[int] | None) -> None:
        if not opening or source_ids == []:
            raise RequestError("prompt: it is empty; a query begins with at least one token")
        if source_ids is not None and len(source_ids) > self.runner.context:
            raise RequestError(
                f"it has {len(source_ids)} tokens, and the model reads {self.runner.context}; "
                "shorten it, or ask for it to be cut"
            )

    def _prediction(self, options: Options) -> list[int]:
        """What drafts may be guessed by, beside the query's own text."""
        if not options.prediction:
            return []
        return self.tokenizer.encode(options.prediction, bos=False)[: self.runner.context]

    def _limit(
        self, opening: list[int], source_ids: list[int] | None, options: Options, window: Window | None
    ) -> int:  # fmt: skip
        """Tokens that the opening and each answer can have together; the cache has room for all answers at once."""
        if window is not None:
            if window.pages * options.n > self.runner.pool.num_pages:
                raise RequestError(f"n: the cache has no room for {options.n} windows of {window.size} tokens")
            return _ENDLESS_TOKENS
        context, answers = self.runner.context, max(options.n, options.beams)
        pages = self.runner.pool.num_pages - (pages_for(len(source_ids)) if source_ids else 0)
        shared = 0 if answers == 1 else len(opening) // PAGE_TOKENS
        tokens = (shared + (pages - shared) // answers) * PAGE_TOKENS
        limit = min(context, tokens)
        if len(opening) >= limit:
            what = f"context of {limit}" if limit == context else f"cache_tokens of {pages * PAGE_TOKENS}"
            asked = len(opening if source_ids is None else source_ids)
            more = f" for {answers} answers" if answers > 1 else ""
            raise RequestError(f"prompt: {asked} tokens leave no room for an answer in a {what}{more}")
        return limit

    def _grammar(self, options: Options, choose: str) -> Grammar | None:
        """What the answers are to match."""
        if options.form is None:
            return None
        if choose == "caller":
            raise RequestError("choose: a caller chooses any token; give no json_schema, regex or lark")
        return self._grammars.of(options)

    @cached_property
    def _grammars(self) -> Grammars:
        from llmc.runtime.decoding.grammar import Grammars  # with a library of its own

        return Grammars(self.tokenizer, self.runner.vocab, sorted(self.eos))

    def _answer(
        self, options: Options, opening: list[int], ends: frozenset[int], window: Window | None, sample: int,
        grammar: Grammar | None,
    ) -> Answer:  # fmt: skip
        own = None if grammar is None else grammar.copy()
        chooser = Chooser(options, opening, self.runner.vocab, ends, self.suppressed, sample, own)
        choices: list[Choice] | None = None if options.logprobs is None else []
        return Answer(sample, chooser, self.tokenizer.stream(), StopMatcher(options.stop), window, choices=choices)
