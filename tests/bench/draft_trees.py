"""What trees of guesses could gain over single ones: counted on a model's own answers, whatever a row costs.

    python tests/bench/draft_trees.py [--threads 2] [--new-tokens 220] [--artifact NAME.llmc]

Greedy answers of the kinds of drafts.py come first. Then their steps are counted as if guesses were looked up in the
text: what followed the place that agrees with most tokens at the end, or what followed the 2, 4 or 8 best ones, joined
to a tree. Tokens of it are fed as long as they are expected to give more tokens for their time; the first row of a step
takes 1, each other one `a row`. How likely a token is is learned on the way, by how many tokens agree before it and how
many others have come before it at its place. Rates are over those of steps of one row.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from drafts import kinds
from engine_case import Row, arguments, show, with_artifact

import llmc
from llmc.runtime import Options

LONGEST, LEAST_AGREED, MOST_AGREED = 7, 2, 16  # tokens of a guess, and those that agree before it
MOST_ROWS = 24
BRANCHES, ROW_COSTS = (1, 2, 4, 8), (0.07, 0.03, 0.01)
GAIN = 1.02  # by which the first token has to pay

Ground = tuple[int, int]  # tokens that agree, others before it at its place
Answer = tuple[list[int], list[int]]  # prompt, what was said


@dataclass
class Node:
    """A token of a tree; `parent` is the place of the one before it, -1 for none."""

    parent: int
    token: int
    ground: Ground


@dataclass
class Chances:
    """How often tokens were right, by what speaks for them."""

    right: dict[Ground, float] = field(default_factory=lambda: defaultdict(lambda: 1.0))
    tried: dict[Ground, float] = field(default_factory=lambda: defaultdict(lambda: 2.0))

    def of(self, ground: Ground) -> float:
        """Of one token, if those before it are right."""
        return self.right[ground] / self.tried[ground]

    def learn(self, ground: Ground, right: bool) -> None:
        """What came of one."""
        self.tried[ground] += 1
        self.right[ground] += right


def places(ids: list[int]) -> list[tuple[int, int]]:
    """(tokens that agree with the end, place) of all places with enough, the best and then the last ones first."""
    found = []
    for place in range(len(ids) - 2, -1, -1):
        agreed = 0
        while agreed < MOST_AGREED and agreed <= place and ids[place - agreed] == ids[-1 - agreed]:
            agreed += 1
        if agreed >= LEAST_AGREED:
            found.append((agreed, place))
    return sorted(found, key=lambda each: (-each[0], -each[1]))


def tree(ids: list[int], branches: int) -> list[Node]:
    """What followed the best places, joined where it begins alike."""
    nodes: list[Node] = []
    children: dict[int, dict[int, int]] = defaultdict(dict)
    for agreed, place in places(ids)[:branches]:
        at = -1
        for depth, token in enumerate(ids[place + 1 : place + 1 + LONGEST]):
            if token not in children[at]:
                nodes.append(Node(at, token, (agreed + depth, len(children[at]))))
                children[at][token] = len(nodes) - 1
            at = children[at][token]
    return nodes


def fed(nodes: list[Node], chances: Chances, row_cost: float) -> set[int]:
    """Places of the tokens that are worth their rows."""
    odds: list[float] = []
    for node in nodes:
        odds.append(chances.of(node.ground) * (odds[node.parent] if node.parent >= 0 else 1))
    order = sorted(range(len(nodes)), key=lambda number: -odds[number])[: MOST_ROWS - 1]
    expected, best, worth = 1.0, 0, GAIN
    for count, number in enumerate(order, 1):
        expected += odds[number]
        if expected / (1 + row_cost * count) > worth:
            best, worth = count, expected / (1 + row_cost * count)
    return set(order[:best])


def steps_saved(answers: list[Answer], branches: int, row_cost: float) -> float:
    """Tokens for the time of a step of one row."""
    chances, tokens, seconds = Chances(), 0, 0.0
    for prompt, said in answers:
        done = 1
        while done < len(said):
            nodes = tree(prompt + said[:done], branches)
            chosen = fed(nodes, chances, row_cost)
            at, right = -1, 0
            while done + right < len(said):
                children = [number for number in chosen if nodes[number].parent == at]
                for number in children:
                    chances.learn(nodes[number].ground, nodes[number].token == said[done + right])
                found = [number for number in children if nodes[number].token == said[done + right]]
                if not found:
                    break
                at, right = found[0], right + 1
            took = min(right + 1, len(said) - done)
            done, tokens, seconds = done + took, tokens + took, seconds + 1 + row_cost * len(chosen)
    return tokens / seconds


def answers_of(model: Any, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
    """What the model says to each."""
    found = []
    for prompt in prompts:
        for result in model.engine.follow([model.add(prompt, Options(max_tokens=new_tokens))]):
            if result.done is not None:
                found.append((list(prompt), list(result.done.ids)))
    return found


def main() -> None:
    """Answer, count, print the table."""
    options = arguments(__doc__, threads=2, new_tokens=220).parse_args()

    def measure(artifact: Path) -> list[Row]:
        with llmc.load(artifact, threads=options.threads, drafts=LONGEST) as model:
            said = {
                name: answers_of(model, prompts, options.new_tokens)
                for name, (prompts, wishes) in kinds(model).items()
                if not wishes
            }
        return [
            {
                "a row": f"{row_cost:g}", "guesses": branches,
                **{name: steps_saved(answers, branches, row_cost) for name, answers in said.items()},
            }
            for row_cost in ROW_COSTS
            for branches in BRANCHES
        ]  # fmt: skip

    show("Tokens for the time of a step of one row", with_artifact(options.artifact, measure), options.json)


if __name__ == "__main__":
    main()
