"""Designs the codebooks of compiler/formats/codebooks.py and prints them as that file's tables.

    python tests/bench/design_codebooks.py model.safetensors [c2 c4 ...]

The tables in the repository come from the float32 file of sentence-transformers/all-MiniLM-L6-v2 (encoder layers 0, 1,
3 and 4; 2 and 5 were kept back to judge), half of the blocks, and from Gaussian, Student t (5 degrees of freedom) and
Laplace noise. Those of rotated formats come from the same in blocks of 64, rotated: nearly Gaussian, a block less so
the more its largest number stands out. About ten minutes; NumPy's random numbers are seeded, so the same file gives the
same tables.

Lloyd's algorithm around the scale search that the quantizer itself uses: every block gets its best signed scale, every
entry moves to the weighted mean of the weights / scale it stands for, until the error stays. Then whole numbers:
scalar entries by dynamic programming over all choices of whole numbers, pairs by rounding, at a few sizes each: of
rotated formats at smaller ones too (r6 has 0.3 dB less error where its inner entries are 1 apart, not 1 and 2 in turn).
Those also have an entry of 0, which costs 0.03 dB at most: equal numbers are one number and zeros when rotated, and
what zeros are off would add up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
from safetensors import safe_open

from llmc.compiler.formats.activations import BLOCK, ROTATED, rotate_rows
from llmc.compiler.formats.search import Blocks, Nearest, inverse_of

ENTRIES = {
    "c2": (16, 2), "c2h": (32, 2), "c3": (64, 2), "c3h": (128, 2), "c4": (16, 1), "c5": (32, 1), "c6": (64, 1),
    "r3h": (128, 2), "r4": (16, 1), "r5": (32, 1), "r6": (64, 1),
}  # fmt: skip
STARTS = 12  # of each pair codebook
KEPT_BACK = ("layer.2.", "layer.5.")
LOW, HIGH = -64, 63


def samples(path: str, count: int, block: int) -> np.ndarray:
    """(count, block) blocks, mean square 1 over a row."""
    rng = np.random.default_rng(1)
    pool = []
    with safe_open(path, "numpy") as file:
        for name in sorted(file.keys()):
            if "encoder.layer" in name and not any(kept in name for kept in KEPT_BACK):
                weight = file.get_tensor(name)
                if weight.ndim == 2:
                    pool.append((weight / np.sqrt((weight**2).mean(1, keepdims=True))).reshape(-1, block))
    real = np.concatenate(pool)
    real = real[rng.permutation(len(real))[: count // 2]]
    noise = [
        rng.standard_normal((count * 3 // 16, block)),
        rng.standard_t(5, (count * 4 // 16, block)) / np.sqrt(5 / 3),
        rng.laplace(size=(count // 16, block)) / np.sqrt(2),
    ]
    return np.concatenate([real, *noise]).astype(np.float32)


def fit(x: np.ndarray, values: np.ndarray, steps: int | None) -> tuple[float, np.ndarray, np.ndarray]:
    """x (block, n): relative squared error, scales (n,), codes (block / width, n)."""
    nearest = Nearest(values, steps)
    total = 0.0
    scales, codes = [], []
    for at in range(0, x.shape[1], 1024):
        part = np.ascontiguousarray(x[:, at : at + 1024])
        blocks = Blocks(nearest, part)
        scale = blocks.best_scales()
        inner, square = blocks.sums(inverse_of(scale))
        total += float((scale * (2 * inner - scale * square)).sum(dtype=np.float64))
        scales.append(scale)
        codes.append(nearest.near(part * inverse_of(scale)))
    return 1 - total / float((x**2).sum(dtype=np.float64)), np.concatenate(scales), np.concatenate(codes, axis=1)


def columns_of(x: np.ndarray, scale: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The weights in codebook units, (width, m), and how much each counts, (m,)."""
    y = (x * inverse_of(scale)).astype(np.float64).reshape(width, -1)
    return y, np.tile(scale.astype(np.float64) ** 2, len(x) // width)


def lloyd(x: np.ndarray, values: np.ndarray, zero: bool, rounds: int = 100) -> tuple[float, np.ndarray, np.ndarray]:
    """Error, values (entries, width) with the greatest at 64, scales. With `zero` one of the values is 0."""
    width, last = values.shape[1], np.inf
    steps = 16 if width == 1 else 1
    for _ in range(rounds):
        error, scale, codes = fit(x, values, steps)
        if last - error < 1e-5 * error:
            break
        last = error
        y, count = columns_of(x, scale, width)
        weight = np.bincount(codes.ravel(), count, len(values))
        sums = [np.bincount(codes.ravel(), count * column, len(values)) for column in y]
        used = weight[:, None] > 0
        values = np.where(used, np.stack(sums, axis=1) / np.where(used, weight[:, None], 1), values)
        if zero:
            values[(values**2).sum(1).argmin()] = 0
        values = values * (64 / np.abs(values).max())
    return error, values, scale


def whole_numbers(y: np.ndarray, count: np.ndarray, entries: int, zero: bool) -> np.ndarray:
    """The `entries` whole numbers in -64..63 with the least sum of count * (y - nearest)^2, ascending.

    With `zero`, of those among which is 0.
    """
    fine = 8  # histogram bins a unit
    low, bins = LOW - 64, (HIGH - LOW + 128) * fine
    at = np.clip(((y - low) * fine).astype(np.int64), 0, bins - 1)
    moments = [np.concatenate([[0], np.cumsum(np.bincount(at, count * y**power, bins))]) for power in (0, 1, 2)]
    points = np.arange(LOW, HIGH + 1)

    def cost(point: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        zero, one, two = (m[end] - m[start] for m in moments)
        return two - 2 * point * one + point**2 * zero

    edge = (points - low) * fine
    middle = (edge[:, None] + edge[None, :]) // 2
    between = cost(points[:, None], edge[:, None], middle) + cost(points[None, :], middle, edge[None, :])
    between[np.tril_indices(len(points))] = np.inf
    best, back = cost(points, np.zeros_like(edge), edge), []
    last = cost(points, edge, np.full_like(edge, bins))
    if zero:  # what leaves it out is not among them
        below, above = points < 0, points > 0
        best[above] = last[below] = between[np.ix_(below, above)] = np.inf
    for _ in range(entries - 1):
        through = best[:, None] + between
        back.append(through.argmin(0))
        best = through.min(0)
    path = [int((best + last).argmin())]
    for choice in reversed(back):
        path.append(int(choice[path[-1]]))
    return points[path[::-1]]


def starts(x: np.ndarray, entries: int, width: int) -> Iterator[np.ndarray]:
    """Codebooks to start from."""
    if width == 1:
        for share in (1.0, 0.8, 0.65):  # reach of the positive side
            for power in (1.2, 1.4):  # more than 1: denser near zero
                negative = round(entries * (0.5 + 0.15 * (1 - share)))
                down = -((np.arange(negative, 0, -1) / negative) ** power)
                up = share * (np.arange(1, entries - negative + 1) / (entries - negative)) ** power
                yield 63.8 * np.concatenate([down, up])[:, None] + 0.2
        return
    y = (x / np.abs(x).max(0)).reshape(2, -1).T
    for seed in range(STARTS):
        rng = np.random.default_rng(seed)
        values = y[rng.choice(len(y), entries, replace=False)].astype(np.float64)
        for _ in range(5):  # plain k-means on a sample
            some = y[rng.choice(len(y), 20000)]
            codes = (some @ values.T - 0.5 * (values**2).sum(1)).argmax(1)
            values = np.stack([some[codes == i].mean(0) if (codes == i).any() else v for i, v in enumerate(values)])
        yield values * (64 / np.abs(values).max())


def rounded(x: np.ndarray, values: np.ndarray, scale: np.ndarray, rotated: bool) -> tuple[float, np.ndarray]:
    """The best whole numbers near `values` at some size: error, (entries, width)."""
    y, count = columns_of(x, scale, values.shape[1])
    best = (np.inf, values)
    for size in np.linspace(0.6, 1.04, 45) if rotated else np.linspace(0.9, 1.04, 15):
        if values.shape[1] == 1:
            whole = whole_numbers(y[0] * size, count, len(values), rotated)[:, None]
        else:
            whole = np.clip(np.rint(values * size), LOW, HIGH)
        best = min(best, (fit(x, whole, None)[0], whole), key=lambda pair: pair[0])
    return best


def design(x: np.ndarray, entries: int, width: int, rotated: bool) -> tuple[float, np.ndarray]:
    """Error and (entries, width) whole numbers, the longer side negative, ascending."""
    found = sorted((lloyd(x, start, rotated) for start in starts(x, entries, width)), key=lambda item: item[0])
    error, whole = min((rounded(x, values, scale, rotated) for _, values, scale in found[:3]), key=lambda item: item[0])
    if whole.max() > -whole.min():
        whole = np.clip(-whole, LOW, HIGH)
    return error, whole[np.lexsort(whole.T[::-1])].astype(np.int64)


def main(path: str, names: list[str]) -> None:
    samples_of = {False: samples(path, 16384, BLOCK), True: rotate_rows(samples(path, 16384, ROTATED))}
    for name in names or list(ENTRIES):
        entries, width = ENTRIES[name]
        rotated = name.startswith("r")
        blocks = samples_of[rotated]
        size = blocks.shape[1]
        # A pair's columns: 8g + p and 8g + 4 + p.
        x = blocks.T if width == 1 else blocks.reshape(-1, size // 8, 2, 4).transpose(2, 1, 3, 0).reshape(size, -1)
        error, whole = design(np.ascontiguousarray(x), entries, width, rotated)
        text = (whole + 64).astype(np.uint8).tobytes().hex()
        print(f"# {name}: {-10 * np.log10(error):.2f} dB, {whole.min()}..{whole.max()}")
        print(f'    "{name}": (')
        for at in range(0, len(text), 96):
            print(f'        "{text[at : at + 96]}"')
        print("    ),", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
