"""Has the system keep a file in pages of 4 KB in no order, as it may after other files filled its cache.

    python tests/bench/scatter_pages.py model.llmc/weights.safetensors
    llmc bench model.llmc --no-copy-weights; llmc bench model.llmc

The file is let go first and then read page by page, so that each of them comes to lie where there is room.
"""

from __future__ import annotations

import os
import random
import sys

_PAGE = 4096  # bytes


def scatter(path: str) -> None:
    """Read the pages of a file, which the system let go, in random order."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM):  # the second: a page alone, without others ahead
            os.posix_fadvise(fd, 0, 0, advice)
        places = list(range(0, os.fstat(fd).st_size, _PAGE))
        random.Random(0).shuffle(places)
        for place in places:
            os.pread(fd, _PAGE, place)
    finally:
        os.close(fd)


if __name__ == "__main__":
    scatter(sys.argv[1])
