"""Prompts that are read by parts of the layers: all rows of a long prompt pass through a part in each step.

Layered prefill (https://arxiv.org/abs/2510.08055): a step takes as long as with chunks of tokens, but each layer's
weights are read once for many more tokens, which tells where they are many, as experts are. Answers go through all
layers in every step, as ever.
"""

from __future__ import annotations

from llmc.runtime.engine.drafts import Drafter
from llmc.runtime.engine.policies import FirstCome
from llmc.runtime.engine.query import Answer, Query
from llmc.runtime.engine.room import Room
from llmc.runtime.engine.scheduler import Plan, Portion, Scheduler, cost, rows_within
from llmc.runtime.parts import Passage

_MOST_STEPS = 8  # a passage has the rows of so many steps at most: that bounds the memory that a part works in


class LayeredScheduler(Scheduler):
    """A scheduler whose prompts pass through `parts` parts of the layers, where others wait for the step.

    As many rows pass together as cost a step's budget in each part. A short prompt goes through several parts, or all,
    at once.
    """

    def __init__(self, room: Room, policy: FirstCome, rows: int, most_running: int, drafter: Drafter) -> None:
        super().__init__(room, policy, rows, most_running, drafter)
        assert room.runner.parts is not None
        self.parts = room.runner.parts.count

    def _read(self, plan: Plan, query: Query, answer: Answer, budget: int, paced: bool) -> int:
        if budget <= 0:
            return 0
        assert answer.sequence is not None
        passage, slot = answer.passage, answer.sequence.length
        if passage is None:
            if query.whole or not paced:
                return super()._read(plan, query, answer, budget, paced)
            most = rows_within(min(self.parts, _MOST_STEPS) * budget, slot, paced)
            passage = Passage(self._at_most(most, query, answer), self.parts)
        if passage.rows <= 0:
            return 0
        price = cost(passage.rows, slot, paced)
        through = min(passage.left, max(1, budget * self.parts // price)) if paced else passage.left
        if through < self.parts:
            answer.passage = passage
            plan.portions.append(Portion(query, answer, passage.rows, through, arrives=through == passage.left))
        else:
            plan.portions.append(Portion(query, answer, passage.rows))
        return price * through // self.parts
