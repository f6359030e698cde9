"""Writes the stored weights of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from llmc.compiler import artifact

if TYPE_CHECKING:
    from llmc.compiler.evaluate import StoredWeight

Progress = Callable[[str, int, int], None]
PACKING_THREADS = 2  # packing is NumPy on large arrays, which runs without the interpreter lock


def write_weights(
    folder: Path, stored: list[StoredWeight], source: Any, report: Progress, name: str = artifact.WEIGHTS
) -> dict[str, Any]:
    """Compute the stored weights from `source` and write them in order; the manifest's section on them."""
    from threadpoolctl import threadpool_limits

    def arrays() -> Iterator[NDArray[Any]]:
        """In order, computed a few ahead: memory holds `PACKING_THREADS` + 1 weights at most."""
        # A BLAS of many threads would make the small products of compensation wait for one another, ten times as long.
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(PACKING_THREADS) as pool:
            ahead = [pool.submit(w.compute, source) for w in stored[:PACKING_THREADS]]
            for number in range(len(stored)):
                result = ahead.pop(0).result()
                if number + PACKING_THREADS < len(stored):
                    ahead.append(pool.submit(stored[number + PACKING_THREADS].compute, source))
                yield result

    return artifact.write_weights(folder / name, stored, arrays(), lambda done: report("weights", done, len(stored)))
