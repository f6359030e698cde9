"""Who goes first: in which order queries that wait are let in, and in which order those that run give way."""

from __future__ import annotations

from collections import Counter

from llmc.runtime.engine.query import Query

_READ, _SAID = 1, 2  # what a token costs a user under "fair": https://arxiv.org/abs/2401.00588 section 5.1

Rank = tuple[int, ...]


class FirstCome:
    """Who came first goes first; who came last gives way first. `fixed`: whether ranks never change."""

    fixed = True

    def arrive(self, query: Query) -> None:
        """Take note of a query that has come."""

    def leave(self, query: Query) -> None:
        """Take note of the end of one."""

    def charge(self, query: Query, read: int, said: int) -> None:
        """Take note of what a step did for a query: tokens of its prompt read, and tokens said."""

    def rank(self, query: Query) -> Rank:
        """Those that wait are let in in this order."""
        return (query.id,)

    def standing(self, query: Query) -> Rank:
        """The last of those that run, in this order, gives way first. It never changes, so that the first one ends."""
        return (query.id,)

    def displaces(self, query: Query, running: Query) -> bool:
        """Whether `running` gives way for `query` to be let in."""
        return False


class Priority(FirstCome):
    """Higher priority first, in the order of coming among equals; running ones give way to higher ones."""

    def rank(self, query: Query) -> Rank:
        return (-query.priority, query.id)

    standing = rank

    def displaces(self, query: Query, running: Query) -> bool:
        return query.priority > running.priority


class Fair(FirstCome):
    """The user who has been served least goes first: a counter of tokens for each (https://arxiv.org/abs/2401.00588).

    A user who comes, or comes back, starts no lower than the least of those who have queries, so that nobody saves up.
    """

    fixed = False

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self._queries: Counter[str] = Counter()  # of each user, those that have not ended

    def arrive(self, query: Query) -> None:
        if not self._queries[query.user]:
            least = min((self.served[user] for user in self._queries if self._queries[user]), default=0)
            for user in [user for user in self.served if not self._queries[user] and self.served[user] <= least]:
                del self.served[user], self._queries[user]  # as if it had never come, so that the table stays small
            self.served[query.user] = max(self.served[query.user], least)
        self._queries[query.user] += 1

    def leave(self, query: Query) -> None:
        self._queries[query.user] -= 1

    def charge(self, query: Query, read: int, said: int) -> None:
        self.served[query.user] += _READ * read + _SAID * said

    def rank(self, query: Query) -> Rank:
        return (self.served[query.user], query.id)


POLICIES: dict[str, type[FirstCome]] = {"fcfs": FirstCome, "priority": Priority, "fair": Fair}
