"""x of a linear layer as operands of tensor cores, written once for all warps that multiply it: a launch of its own.

Lanes then read what they multiply as it stands, whatever x was: of each product of 16 columns and eight rows 32 lanes'
words side by side, of all parts. Where weights have stored offsets, sums of x over blocks of columns are with it.
"""

from __future__ import annotations

from typing import Any

from tvm.script.ir_builder import tirx as T

from llmc.targets.cuda.launch import launch, local
from llmc.targets.cuda.operands import STEPS, Operands
from llmc.targets.cuda.product import ROWS, Product
from llmc.targets.cuda.slab import BlockSums
from llmc.targets.cuda.stream import BLOCK, BLOCKS, SLAB
from llmc.targets.cuda.target import WARP

WARPS = 4  # of a block: each has a slab
SUMS = 2 * WARP  # words of eight rows' sums over a slab, `apart`: twice, for both parts of offsets


def block_words(product: Product) -> int:
    """Of eight rows by 32 columns."""
    return STEPS * WARP * 2 * product.x_parts


class Image:
    """x of a product, in memory of the step; made by `write`, outside of launches."""

    def __init__(self, product: Product, eights: int) -> None:
        """For launches whose blocks have so many eights of rows, or a part of them."""
        self.product = product
        self.words = 2 * product.x_parts  # of a lane, for each product
        self.block_words = block_words(product)
        self.offsets = product.form.offsets
        self.eights = self.filled(eights)
        slabs = product.slabs()
        self.slab_words = BLOCKS * self.block_words + self.offsets * SUMS  # of eight rows, where these stand `apart`
        self.data = T.alloc_buffer((self.eights * (slabs * self.slab_words),), "uint32")
        if self.offsets:
            self.sums = T.alloc_buffer((self.eights, slabs * self.offsets * WARP), "uint32")

    def filled(self, eights: int) -> Any:
        """Eights of rows in whole blocks of so many."""
        rows = eights * ROWS
        return T.floordiv(self.product.out.shape[0] + (rows - 1), rows) * eights

    def write(self, eights: int, apart: bool = False) -> None:
        """For blocks of so many eights of rows: a warp for 128 columns of eight rows. Rows beyond the last are any.

        `apart`: a lane's words do not stand side by side, but each beside the same one of other lanes. So eight rows by
        eight columns are 128 bytes, row after row, as `wgmma` takes them; and of all rows of a block of the grid what
        belongs to 32 columns stands together, sums behind the last ones of their slab.
        """
        product = self.product
        slabs = -(-product.slabs() // WARPS)
        grid = {"blockIdx.x": slabs, "blockIdx.y": self.filled(eights), "threadIdx.x": WARPS * WARP}
        with launch(grid) as (block, eight, thread):
            slab, lane = block * WARPS + T.floordiv(thread, WARP), thread % WARP
            operands = Operands(product.form, thread)
            sums = BlockSums(operands, 1)
            held = local((self.words,), "uint32")
            with T.If(slab < product.slabs()), T.Then():
                sums.begin()
                for of in range(BLOCKS):
                    words = product.words(eight * ROWS + operands.first, slab * SLAB + of * BLOCK, operands)
                    for step in range(STEPS):
                        for at, word in enumerate(words[step]):
                            T.buffer_store(held, word, [at])
                        if apart:
                            first = self.apart(T.floordiv(eight, eights), slab, of, eights)
                            first = first + eight % eights * self.block_words + step * WARP * self.words
                            for at in range(self.words):
                                T.buffer_store(self.data, held[at], [first + at * WARP + lane])
                        else:
                            place = self._place(eight, slab, of, step, lane)
                            T.buffer_store(self.data, held[T.ramp(0, 1, self.words)], [place])
                    sums.add(0, of, words)
                for at in range(self.offsets):
                    if apart:
                        first = self.apart(T.floordiv(eight, eights), slab, BLOCKS, eights)
                        first = first + (at * eights + eight % eights) * SUMS
                        T.buffer_store(held, sums.pair(0, at), [0])
                        for copy in range(SUMS // WARP):
                            T.buffer_store(self.data, held[0], [first + copy * WARP + lane])
                    else:
                        T.buffer_store(self.sums, sums.pair(0, at), [eight, (slab * self.offsets + at) * WARP + lane])

    def apart(self, rows: Any, slab: Any, block: int, eights: int) -> Any:
        """The first word of 32 columns of so many eights of rows, or behind all blocks of a slab, of their sums."""
        before = (rows * self.product.slabs() + slab) * (eights * self.slab_words)
        return before + block * eights * self.block_words

    def _place(self, n: Any, slab: Any, block: int, step: int, lane: Any) -> Any:
        first = ((n * self.product.slabs() + slab) * BLOCKS + block) * self.block_words
        first = first + (step * WARP + lane) * self.words
        return T.ramp(first, 1, self.words)

    def read(self, n: Any, slab: Any, block: int, step: int, lane: Any) -> list[Any]:
        """A lane's words of eight rows for a product."""
        held = local((self.words,), "uint32")
        place = self._place(n, slab, block, step, lane)
        T.buffer_store(held, self.data[place], [T.ramp(0, 1, self.words)])
        return [held[i] for i in range(self.words)]

    def pair(self, n: Any, slab: Any, at: int, lane: Any) -> Any:
        """Of row g of eight, the sum over the lane's own block, as two parts."""
        return self.sums[n, (slab * self.offsets + at) * WARP + lane]
