"""Makes targets/tuned_defaults.json, the knobs that compile uses without a database, from databases of `llmc tune`.

    echo '[]' > targets/tuned_defaults.json     # so that all is measured against the defaults of Knobs
    llmc tune smollm2.gguf --quant q4 -o a.json --threads 1 && llmc tune llama.gguf --quant q4 -o b.json --threads 1
    python tests/bench/tuned_defaults.py a.json b.json

For an op and a format those knobs count that gain most over all of its kernels in all databases, of these that lose for
no kernel and at no number of rows, on average over the others. What CPUs have that no database is of stays as it is,
and so does what an entry has for `every` kernel and for `wide` rows, written by hand from measurements
(kernel_speed.py).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

from llmc.compiler.driver.tuning.database import Entry, Values, read_database
from llmc.compiler.driver.tuning.search import mean_gain

DEFAULTS = Path(__file__).parents[2] / "targets" / "tuned_defaults.json"
SLACK = 0.01  # how much slower a mean of short measurements may say that equal code is
LEAST_GAIN = 0.02


def main() -> None:
    """Read the databases, write the file, print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="+", type=Path)
    kernels: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for path in parser.parse_args().databases:
        for target, section in read_database(path).targets.items():
            for key, entry in section.kernels.items():
                kernels[target][family(key)].append(entry)
    known = {(e["arch"], tuple(e["requires"])): e for e in json.loads(DEFAULTS.read_text())}
    for target, families in kernels.items():
        arch, *flags = target.split()
        best = {name: knobs for name, entries in sorted(families.items()) if (knobs := common(entries))}
        known.setdefault((arch, tuple(flags)), {"arch": arch, "requires": flags})["families"] = best
    text = json.dumps([known[key] for key in sorted(known)], indent=1, sort_keys=True) + "\n"
    DEFAULTS.write_text(text)
    print(text, end="")


def family(key: str) -> str:
    """Op and format of a kernel's key, as `family_key` spells them."""
    name, *attrs = key.partition(": ")[0].split()
    formats = [attr.partition("=")[2] for attr in attrs if attr.startswith("format=")]
    return " ".join([name, *formats])


def common(entries: list[Entry]) -> Values:
    """The knobs that every kernel tried and that lose for none; empty where none gain over the default."""
    gains: dict[tuple[tuple[str, int], ...], list[dict[str, float]]] = defaultdict(list)
    for entry in entries:
        for tried in entry.tried:
            gains[tuple(sorted(tried.knobs.items()))].append(tried.gain)
    score = {}
    for knobs, each in gains.items():
        by_rows = [mean_gain({str(i): gain[rows] for i, gain in enumerate(each)}) for rows in each[0]]
        by_kernel = [mean_gain(gain) for gain in each]
        if len(each) == len(entries) and min(*by_rows, *by_kernel) > 1 - SLACK:
            score[knobs] = math.prod(by_kernel) ** (1 / len(each))
    best = max(score, key=lambda knobs: score[knobs], default=())
    if best and score[best] > 1 + LEAST_GAIN:
        return dict(best)
    defaults = [entry.default for entry in entries]
    return defaults[0] if all(default == defaults[0] for default in defaults) else {}


if __name__ == "__main__":
    main()
