"""Pages for queries: lets them in, takes their pages away for a while, keeps what they have read."""

from __future__ import annotations

import time

from llmc.runtime.cache.pages import Sequence
from llmc.runtime.cache.prefix_tree import PrefixTree
from llmc.runtime.cache.swap import put_back, swap_out
from llmc.runtime.engine.query import Answer, Query
from llmc.runtime.runner import Runner


class Room:
    """Who holds pages. A query holds some while it runs, and none when it waits or has ended.

    tree: what keeps pages for texts that begin alike, if anything does. swaps: pages that are taken away go to the
    host's memory where one answer holds them; else they are dropped, and what was read and said is read again. Either
    way the query goes on as if nothing had been.
    """

    def __init__(self, runner: Runner, tree: PrefixTree | None, swaps: bool) -> None:
        self.runner = runner
        self.pool = runner.pool
        self.tree = tree
        self.swaps = swaps
        self.hits = 0

    def promised(self, running: list[Query]) -> int:
        """Pages that queries which run will want before long: for what they are yet to be fed, and one for each answer
        to say something."""
        return sum(query.pages_missing() + len(query.speaking) for query in running)

    def let_in(self, query: Query, promised: int | None) -> bool:
        """Give a waiting query its sequences if there is room for it beside what is promised to others; whether it is.

        It runs then. promised: None if nobody runs: then there is room. Raises CacheFull where there is not even then,
        for pages that are not the engine's.
        """
        if not self._begin(query, promised):
            query.waited = True
            return False
        if query.waited and not query.read_time:
            query.start = time.perf_counter()
        query.state = "running"
        return True

    def put_out(self, query: Query) -> None:
        """Take the pages of a running query away; it waits then."""
        under_way = any(answer.under_way for answer in query.speaking)  # whose logits would come to one that waits
        if self.swaps and len(query.speaking) == 1 and not under_way and not query.unborn and not query.whole:
            self._swap_out(query)
        else:
            self.keep(query)
            self.drop(query)

    def drop(self, query: Query) -> None:
        """Take all pages back; what was in them has to be read again."""
        for sequence in query.sequences:
            self.pool.release(sequence)
        query.source, query.source_read = None, False
        query.unborn, query.copies = [], []
        for answer in query.answers:
            answer.sequence, answer.todo, answer.slid, answer.passage = None, [], False, None
            answer.under_way, answer.draft = [], None

    def end(self, answer: Answer) -> None:
        """Take the pages of an answer back that has ended."""
        if answer.sequence is not None:
            self.pool.release(answer.sequence)
        answer.sequence, answer.todo, answer.row, answer.passage, answer.under_way = None, [], None, None, []
        answer.draft = answer.lookup = None

    def keep(self, query: Query) -> None:
        """Keep the pages of what a query has read so far, for others that begin alike."""
        if self.tree is None or query.whole or query.source_ids is not None:
            return
        for answer in query.speaking:
            assert answer.sequence is not None
            if not answer.slid:
                self.tree.insert(answer.sequence, query.reads(answer), query.salt)

    def _begin(self, query: Query, promised: int | None) -> bool:
        """Its sequences, with what the cache still has of them, and what is left to feed; False if they do not fit."""
        if query.copies:
            if not self._fits(sum(copy.pages + 1 for _, copy in query.copies), promised):
                return False
            self._swap_in(query)
            return True
        first, *others = query.going
        ids = query.first_reads()
        if query.source_ids is not None:
            query.source = self.runner.new_sequence()
        first.sequence = self._match(query, first, ids)
        first.todo = ids[first.sequence.length :]
        query.unborn = others
        if not self._fits(query.pages_missing(), promised):
            self.drop(query)
            return False
        self.hits += first.sequence.length
        query.hits = query.hits if query.read_time else first.sequence.length
        return True

    def _match(self, query: Query, first: Answer, ids: list[int]) -> Sequence:
        if self.tree is None or query.whole or query.source_ids is not None:
            return self.runner.new_sequence(query.source)
        most = len(ids) if first.window is None else first.window.size
        return self.tree.match(ids[:most], query.salt)

    def _fits(self, wanted: int, promised: int | None) -> bool:
        """Whether the free pages, and those that the tree can do without, last for all."""
        if promised is None or wanted + promised <= self.pool.free_pages:
            return True
        return self.tree is not None and wanted + promised <= self.pool.free_pages + self.tree.kept_pages

    def _swap_out(self, query: Query) -> None:
        query.copies = [(sequence, swap_out(self.pool, sequence)) for sequence in query.sequences]
        for answer in query.answers:
            answer.passage = None  # what it left in pages behind the sequence's end is not in the copy

    def _swap_in(self, query: Query) -> None:
        try:
            for sequence, copy in query.copies:
                put_back(self.pool, sequence, copy)
        except BaseException:
            for sequence, _ in query.copies:
                self.pool.release(sequence)
            raise
        query.copies = []
