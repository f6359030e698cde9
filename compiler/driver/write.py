"""Writes the stored weights of an artifact."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from llmc.compiler import artifact
from llmc.compiler.progress import Progress

if TYPE_CHECKING:
    from llmc.compiler.evaluate import StoredWeight

AHEAD_BYTES = 32 << 20  # of weights that are computed and not yet written, about
PACKING_THREADS = 2  # packing is NumPy on large arrays, which runs without the interpreter lock


def write_weights(
    folder: Path, stored: list[StoredWeight], source: Any, report: Progress, name: str = artifact.WEIGHTS
) -> dict[str, Any]:
    """Compute the stored weights from `source` and write them in order; the manifest's section on them."""
    from threadpoolctl import threadpool_limits

    def arrays() -> Iterator[NDArray[Any]]:
        """In order, computed a few ahead, so that no thread waits while a small one stands behind a large one."""
        # A BLAS of many threads would make the small products of compensation wait for one another, ten times as long.
        with threadpool_limits(1, "blas"), ThreadPoolExecutor(PACKING_THREADS) as pool:
            ahead: deque[Future[NDArray[Any]]] = deque()
            for number in range(len(stored)):
                while _has_room(stored[number : number + len(ahead)]) and number + len(ahead) < len(stored):
                    ahead.append(pool.submit(stored[number + len(ahead)].compute, source))
                yield ahead.popleft().result()

    return artifact.write_weights(folder / name, stored, arrays(), lambda done: report("weights", done, len(stored)))


def _has_room(ahead: list[StoredWeight]) -> bool:
    """Whether another weight may be computed, beside those that are not yet written."""
    return len(ahead) < PACKING_THREADS or sum(weight.nbytes for weight in ahead) < AHEAD_BYTES
