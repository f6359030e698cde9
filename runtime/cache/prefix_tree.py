"""Pages of texts that were read before, kept so that a text that begins alike need not be read again.

A tree whose every step is a block: the 16 tokens of one whole page (https://arxiv.org/abs/2312.07104, RadixAttention).
What a page holds depends on all tokens before it, so the way from the root is its name. Each salt has a tree of its
own: queries that do not share one never learn, not even by how long they take, what the others read. Whole pages are
never written again, so that any number of sequences may hold them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from llmc.runtime.cache.ledger import NO_PAGE
from llmc.runtime.cache.pages import PagePool, Sequence, first_seen
from llmc.runtime.loading.manifest import PAGE_TOKENS

_BLOCK_BYTES = 4 * PAGE_TOKENS  # its tokens as int32


@dataclass(eq=False, slots=True)
class _Node:
    """A block: its page in each group of layers, NO_PAGE where it is not kept."""

    parent: _Node | None
    key: bytes
    pages: list[int] = field(default_factory=list)
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixTree:
    """Blocks of tokens that were read, with their pages, for texts that are neither slid nor answers to a source.

    The tree is a holder of its pages. It becomes what the pool turns to when pages are short, and then gives up blocks
    that no sequence holds, those that were not wanted for longest first.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._roots: dict[str, _Node] = {}
        # From the block that was not wanted for longest. A way is touched from its end, so no block is before one
        # that follows it in a text.
        self._order: OrderedDict[_Node, str] = OrderedDict()
        self._kept = [np.zeros(pool.num_pages, np.bool_) for _ in pool.groups]
        pool.reclaim = self.evict

    def __len__(self) -> int:
        """Blocks kept."""
        return len(self._order)

    @property
    def tables(self) -> list[array[int]]:
        """Pages kept, for each group of layers."""
        with self.pool.lock:
            return [array("i", [node.pages[group] for node in self._order]) for group in range(len(self.pool.groups))]

    @property
    def kept_pages(self) -> int:
        """Pages of a group, of the one with fewest of them, that only the tree holds: they are as good as free."""
        with self.pool.lock:
            pairs = zip(self._kept, self.pool.ledgers, strict=True)
            return min(int(np.count_nonzero(kept & (ledger.holders == 1))) for kept, ledger in pairs)

    def match(self, ids: SequenceOf[int], salt: str = "") -> Sequence:
        """A sequence with the longest beginning of `ids` that is kept, in whole pages; empty where there is none.

        At least the last of `ids` is left to be fed, so that there are logits.
        """
        sequence = self.pool.new_sequence()
        with self.pool.lock:
            way = list(self._way(_blocks(ids[:-1]), salt))
            way = way[: self._usable(way)]
            self._touch(way, salt)
            length = len(way) * PAGE_TOKENS
            windows = enumerate(zip(self.pool.groups, self.pool.ledgers, strict=True))
            for number, (group, ledger) in windows:
                unseen = first_seen(group.window, length) // PAGE_TOKENS
                pages = [NO_PAGE] * unseen + [node.pages[number] for node in way[unseen:]]
                sequence.tables[number] = array("i", pages)
                ledger.share(pages)
            sequence.length = sequence.position = length
        return sequence

    def insert(self, sequence: Sequence, ids: SequenceOf[int], salt: str = "") -> None:
        """Keep the whole pages of `sequence`, whose tokens are `ids`, beside what is kept already.

        Where others read the same before, the sequence gets their pages for its own, so that one copy is left. A
        sequence that has a hole, whose positions have moved, or that answers to a source, is passed over.
        """
        if sequence.source is not None or sequence.hole != (0, 0) or sequence.position != sequence.length:
            return
        blocks = _blocks(ids[: sequence.length])
        with self.pool.lock:
            node = self._roots.setdefault(salt, _Node(None, b""))
            way = []
            for at, block in enumerate(blocks):
                if block not in node.children and all(table[at] == NO_PAGE for table in sequence.tables):
                    break
                node = node.children.setdefault(block, _Node(node, block, [NO_PAGE] * len(sequence.tables)))
                self._join(node, sequence, at)
                way.append(node)
            self._touch(way, salt)
            self._drop_root(salt)

    def evict(self, free: SequenceOf[int]) -> None:
        """Give up blocks that only the tree holds until each group has so many free pages, or none are left."""
        with self.pool.lock:
            for node in list(self._order):
                short = [ledger.free < count for ledger, count in zip(self.pool.ledgers, free, strict=True)]
                if not any(short):
                    return
                if not node.children and not any(self._shared(node, group) for group in range(len(short))):
                    self._remove(node)
                    continue
                for group in range(len(short)):  # a sequence holds what follows, and has left this behind
                    if short[group] and not self._shared(node, group):
                        self._give_up(node, group)

    def clear(self) -> None:
        """Give up everything; pages that sequences hold stay with them."""
        with self.pool.lock:
            for node in list(self._order):
                self._remove(node)

    def close(self) -> None:
        """`clear`, and let the pool do without it."""
        with self.pool.lock:
            self.clear()
            if self.pool.reclaim == self.evict:
                self.pool.reclaim = None

    def _way(self, blocks: list[bytes], salt: str) -> Iterator[_Node]:
        """Nodes of as many `blocks` as are kept one after another."""
        node = self._roots.get(salt)
        for block in blocks:
            node = node and node.children.get(block)
            if node is None:
                return
            yield node

    def _usable(self, way: list[_Node]) -> int:
        """How many nodes of `way` a sequence can begin with: each page that its next row will see must be kept."""
        groups = list(enumerate(self.pool.groups))
        missing = [[at for at, node in enumerate(way) if node.pages[number] == NO_PAGE] for number, _ in groups]
        for count in range(len(way), 0, -1):
            for places in missing:
                while places and places[-1] >= count:
                    places.pop()
            first = [first_seen(group.window, count * PAGE_TOKENS) // PAGE_TOKENS for _, group in groups]
            if all(not places or places[-1] < seen for places, seen in zip(missing, first, strict=True)):
                return count
        return 0

    def _join(self, node: _Node, sequence: Sequence, at: int) -> None:
        """Hold page `at` of the sequence where the node has none of that group yet, else have the sequence hold it."""
        for group, (ledger, table) in enumerate(zip(self.pool.ledgers, sequence.tables, strict=True)):
            if table[at] in (NO_PAGE, node.pages[group]):
                continue
            if node.pages[group] == NO_PAGE:
                node.pages[group] = table[at]
                self._kept[group][table[at]] = True
                ledger.share((table[at],))
            else:
                ledger.drop((table[at],))
                table[at] = node.pages[group]
                ledger.share((table[at],))

    def _touch(self, way: list[_Node], salt: str) -> None:
        for node in reversed(way):
            self._order[node] = salt
            self._order.move_to_end(node)

    def _shared(self, node: _Node, group: int) -> bool:
        """Whether a sequence holds the node's page too."""
        return node.pages[group] != NO_PAGE and self.pool.ledgers[group].count(node.pages[group]) > 1

    def _give_up(self, node: _Node, group: int) -> None:
        if node.pages[group] != NO_PAGE:
            self.pool.ledgers[group].drop((node.pages[group],))
            self._kept[group][node.pages[group]] = False
            node.pages[group] = NO_PAGE

    def _remove(self, node: _Node) -> None:
        """Forget a node without children."""
        assert node.parent is not None
        for group in range(len(node.pages)):
            self._give_up(node, group)
        del node.parent.children[node.key]
        self._drop_root(self._order.pop(node))

    def _drop_root(self, salt: str) -> None:
        if not self._roots[salt].children:
            del self._roots[salt]


def _blocks(ids: SequenceOf[int]) -> list[bytes]:
    """Tokens of whole pages, a key for each."""
    raw = np.asarray(ids, np.int32).tobytes()
    whole = len(raw) // _BLOCK_BYTES
    return [raw[at * _BLOCK_BYTES : (at + 1) * _BLOCK_BYTES] for at in range(whole)]
