"""How a block of attention on CUDA is laid out: its queries, what each warp and lane has of K, V and their products."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.errors import LlmcError
from llmc.compiler.kv_pages import PAGE
from llmc.targets.cuda.sight import CHUNK
from llmc.targets.cuda.target import STATIC_SHARED_BYTES, WARP

THREADS = 128
WARPS = THREADS // WARP
TILE = 16  # queries of one product
HALVES = 2  # a lane holds sums of two queries of a tile
K = 16  # elements that one product adds up
EIGHT = 8  # columns of one product
WARP_PAGES = CHUNK // PAGE // WARPS  # that a warp scores
MOST_TILES = 4
WEIGHT_PARTS = 2  # of bfloat16 that a weight goes in: one would be wrong by 1/512
MOST_SUMS = 64  # registers of a thread for the sums of a chunk, where there are several tiles


@dataclass(frozen=True)
class Block:
    """What a block has: tiles of queries, `heads` of each row, of so many elements."""

    heads: int
    size: int
    parts: int  # of bfloat16 that a number of K, V and queries goes in
    tiles: int

    @property
    def queries(self) -> int:
        """Of all tiles; those beyond the last row's belong to nobody."""
        return self.tiles * TILE

    @property
    def rows(self) -> int:
        """Rows of the step that the queries are of."""
        return self.queries // self.heads

    @property
    def steps(self) -> int:
        """Products that a score adds up."""
        return -(-self.size // K)

    @property
    def unroll(self) -> bool | None:
        """Of loops over loads and products: of one tile there are few, so that many may be under way at once."""
        return None if self.tiles == 1 else False

    @property
    def vector(self) -> int:
        """Neighbouring elements of V that a lane reads at once."""
        return next(count for count in (4, 2, 1) if count == 1 or self.size % (count * EIGHT * WARPS) == 0)

    @property
    def groups(self) -> int:
        """Groups of elements of V: as many as eight lanes read at once."""
        return -(-self.size // (EIGHT * self.vector))

    @property
    def own_groups(self) -> int:
        """Groups of a warp, at most."""
        return -(-self.groups // WARPS)

    @property
    def owners(self) -> list[int]:
        """Of a thread's sums, which of its queries they are of: by groups, elements, tiles, places in a product."""
        return [t * HALVES + i // 2 for _ in range(self.own_groups * self.vector) for t in range(self.tiles)
                for i in range(4)]  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """Queries and weights as words, what warps found, whose the queries are; some for counting rows."""
        words = (self.steps * K * self.parts + CHUNK * WEIGHT_PARTS) // 2
        return 4 * self.queries * (words + 2 * WARPS + 2) + (1 << 10)

    @staticmethod
    def best(heads: int, size: int, parts: int, most: int = MOST_TILES) -> Block:
        """That of most tiles for which there is room. Raises LlmcError if there is none for one."""
        tiles = most
        while tiles:
            block = Block(heads, size, parts, tiles)
            if block.shared_bytes <= STATIC_SHARED_BYTES and (tiles == 1 or len(block.owners) <= MOST_SUMS):
                return block
            tiles //= 2
        raise LlmcError(f"attention of heads of {size}: no CUDA kernel holds one")
