"""What of a kernel may be tuned: the same results to the last bit, at another speed."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Knobs:
    """The tuning of one kernel. Defaults are what most machines do well with."""

    prefetch_bytes: int = 8192  # how far ahead a weight stream is asked for when it is read at memory's speed; 0: not
    few_rows: int = 2  # with how many rows at most it is, where one instruction does the products of a word and a row
    prefetch_far_bytes: int = 8192  # the same, into the second-level cache, when rows make work of each line
    prefetch_near_bytes: int = 0  # and of those lines the ones nearer, into the first level, as they come; 0: not
    row_block: int = 128  # rows whose activations stay in the second-level cache while weights stream
    row_group: int = 0  # rows that share each weight register; 0: what the target has registers for
    tile_rows: int = 8  # from so many rows on tile registers are used where there are some; 0: never
    pair_rows: int = 4  # from so many rows on two tiles of outputs share what is loaded of the rows; 0: never
    panel_rows: int = 9  # from so many rows on weights are unpacked once for all, where vectors multiply; 0: never


# Knob -> the values `llmc tune` tries, the default among them: one line for each. Any of them is right for any kernel.
CANDIDATES: dict[str, tuple[int, ...]] = {
    "prefetch_bytes": (0, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384),
    "few_rows": (0, 1, 2, 4),
    "prefetch_far_bytes": (0, 2048, 3072, 4096, 4608, 5120, 6144, 7168, 8192, 16384),
    "prefetch_near_bytes": (0, 512, 1024, 2048, 2560, 3072),
    "row_block": (32, 64, 128, 256, 512),
    "row_group": (0, 2, 4, 5, 6, 7, 8),
    "tile_rows": (0, 4, 7, 8, 9, 10, 12, 16, 24),
    "pair_rows": (0, 3, 4, 6, 9),
    "panel_rows": (0, 6, 7, 9, 12, 16, 24),
}


class Watched(Knobs):
    """Knobs that remember which of them were read: what a kernel's template asks for is what can be tuned in it."""

    def read(self) -> list[str]:
        """Names of the knobs read so far, in the order of the class."""
        return [field.name for field in fields(Knobs) if field.name in vars(self).get("_read", ())]

    def __getattribute__(self, name: str) -> int:
        if name in CANDIDATES:
            vars(self).setdefault("_read", set()).add(name)
        value: int = super().__getattribute__(name)
        return value
