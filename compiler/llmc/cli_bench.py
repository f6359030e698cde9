"""`llmc bench`: how fast an artifact is here, next to how fast this machine reads memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from llmc.console import json_option, print_json, print_table, progress_bars
from llmc.options import copy_weights_option, devices_option, positive_list
from llmc.runtime.workers.world import forget_mpirun, launched, rank_said

# The least work that loads, and so hashes, all there is.
_SHORTEST = {"batch": 1, "prompt_tokens": 1, "new_tokens": 2, "repeats": 1}

_COLUMNS = (
    "threads",
    "batch",
    "prefill tok/s",
    "min..max",
    "decode tok/s",
    "min..max",
    "MB/step",
    "read GB/s",
    "of limit",
    "load s",
    "peak MB",
)


@click.command(
    short_help="Measure speed, load time and memory.",
    epilog="""\b
Examples:
  llmc bench smollm2.llmc
  llmc bench smollm2.llmc --prompt-tokens 128 --new-tokens 32 --batch 1 --threads 1 --json
  llmc bench two.llmc --devices --threads 1""",
)
@click.argument("artifact", metavar="NAME.llmc")
@click.option("--prompt-tokens", type=click.IntRange(1), default=512, show_default=True, metavar="N")
@click.option("--new-tokens", type=click.IntRange(2), default=128, show_default=True, metavar="N")
@click.option(
    "--batch",
    callback=positive_list,
    default="1,8",
    show_default=True,
    metavar="N,N,...",
    help="Sequences at once.",
)
@click.option(
    "--threads",
    callback=positive_list,
    metavar="N,N,...",
    help="CPU threads, at most every core allowed (default: one, and every core allowed).",
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@copy_weights_option
@devices_option
@json_option
def bench(
    artifact: str,
    prompt_tokens: int,
    new_tokens: int,
    batch: tuple[int, ...],
    threads: tuple[int, ...] | None,
    repeats: int,
    copy_weights: bool | None,
    devices: bool,
    as_json: bool,
) -> None:
    """Measure NAME.llmc: a row for each number of threads and each batch, medians of the repeats.

    Each row runs in a process of its own, on fixed token ids, greedily. 'read GB/s' is how fast
    plain NumPy loops read memory here with as many threads; 'of limit' is the share of the steps
    per second that rate allows for the weight bytes a step reads (keys and values not counted).
    With --devices each row runs in workers of its own: threads are those of each worker, 'read GB/s'
    is of as many as a stage has together, 'peak MB' is the sum over workers, and 'largest' the
    most that one of them took.
    """
    import llmc.runtime
    from llmc.runtime.loading.cpu import default_threads

    manifest = llmc.runtime.inspect(artifact)
    width = _widest_stage(manifest)
    if width and launched():
        if rank_said() != 0:
            return  # rank 0 starts workers for each row
        devices = True
        forget_mpirun()
    most = default_threads()
    usual = (1, max(1, most // len(manifest["devices"]["ranks"])) if width else most)
    counts = tuple(dict.fromkeys(min(count, most) for count in threads or usual))
    sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    rows: list[dict[str, Any]] = []
    with progress_bars() as progress:
        # The first load of an artifact hashes its weights; that is not the load time to report.
        if devices:
            worker({"artifact": artifact, "threads": 1, "devices": True, **_SHORTEST})
        else:
            llmc.runtime.load(artifact, threads=1, progress=progress).close()
        folder = Path(artifact)  # which that load has checked
        step_bytes = {sequences: weight_bytes_per_step(folder, manifest, sequences) for sequences in batch}
        total = len(counts) * len(batch)
        for count in counts:
            read = worker({"only_read": True, "threads": min(count * max(1, width), most)})["read_bytes_per_s"]
            for sequences in batch:
                progress("measuring", len(rows), total)
                case = {"artifact": artifact, "threads": count, "batch": sequences, **sizes}
                raw = worker({**case, "repeats": repeats, "copy_weights": copy_weights, "devices": devices})
                rows.append(_row({**case, "repeats": repeats}, raw, step_bytes[sequences], read))
    if as_json:
        print_json(rows)
        return
    print_table([_cells(row, bool(width)) for row in rows], columns=(*_COLUMNS, *(["largest"] if width else [])))


def _widest_stage(manifest: dict[str, Any]) -> int:
    """How many devices run at the same time for one sequence; 0 where there is no word of devices."""
    stages = [each["stage"] for each in manifest.get("devices", {"ranks": []})["ranks"]]
    return max((stages.count(stage) for stage in stages), default=0)


def worker(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in a fresh process and return what it measured; its one-line refusal becomes ours."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # a folder named llmc here must not be it
    done = subprocess.run(
        [sys.executable, "-m", "llmc.bench_case", json.dumps(case)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise click.ClickException(lines[-1].removeprefix("llmc: ") if lines else f"ended by signal {-done.returncode}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def weight_bytes_per_step(folder: Path, manifest: dict[str, Any], rows: int = 1) -> int:
    """Return the bytes of weights that a step reads: all, less an embedding that is no head, and an encoder's.

    Of experts it is those that `rows` rows are expected to use between them, were all used alike; of an artifact for
    several devices what all of them read together.
    """
    used = _experts_read(manifest["spec"].get("experts"), rows)
    if "devices" not in manifest:
        return _read_by(folder, manifest, manifest["weights"], True, used)
    ranks = manifest["devices"]["ranks"]
    return sum(_read_by(folder, manifest, r["weights"], r["stage"] == ranks[-1]["stage"], used) for r in ranks)


def _experts_read(experts: dict[str, Any] | None, rows: int) -> float:
    """The share of a layer's experts that so many rows use.

    >>> _experts_read({"count": 128, "used": 8}, rows=2) * 128
    15.5
    """
    return 1 - (1 - experts["used"] / experts["count"]) ** rows if experts and experts["count"] else 1.0


def _read_by(
    folder: Path, manifest: dict[str, Any], weights: dict[str, Any], last_stage: bool, experts_read: float
) -> int:
    """Sizes come from the header of the safetensors file: 8 bytes of length, then JSON."""
    with (folder / weights["file"]).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = weights["order"]
    if not (manifest["spec"]["head"]["tied"] and last_stage):  # then it is only looked up, a row a token
        names = [name for name in names if name.split(".")[0] != "embedding"]
    if manifest["task"] == "translate":  # cross_k: an encoder's last work, with cross_v
        names = [name for name in names if name.split(".")[0] != "encoder" and ".cross_k" not in name]
    ends = {name: header[name]["data_offsets"] for name in names}
    return round(
        sum((end - start) * (experts_read if ".experts." in name else 1) for name, (start, end) in ends.items())
    )


def _row(case: dict[str, Any], raw: dict[str, Any], step_bytes: int, read: float) -> dict[str, Any]:
    prefill, decode = statistics.median(raw["prefill"]), statistics.median(raw["decode"])
    steps_per_s = decode / case["batch"]
    return {
        **{name: value for name, value in case.items() if name != "artifact"},
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": decode,
        "spread": {
            "prefill_tokens_per_s": [min(raw["prefill"]), max(raw["prefill"])],
            "decode_tokens_per_s": [min(raw["decode"]), max(raw["decode"])],
        },
        "load_s": raw["load_s"],
        "peak_rss_mb": sum(raw["peak_rss"]) / 1e6,
        "largest_rss_mb": max(raw["peak_rss"]) / 1e6,
        "weight_bytes_per_step": step_bytes,
        "read_bytes_per_s": read,
        "share_of_read_limit": steps_per_s * step_bytes / read,
    }


def _cells(row: dict[str, Any], workers: bool) -> tuple[str, ...]:
    prefill, decode = (row["spread"][f"{name}_tokens_per_s"] for name in ("prefill", "decode"))
    return (
        str(row["threads"]),
        str(row["batch"]),
        f"{row['prefill_tokens_per_s']:.0f}",
        f"{prefill[0]:.0f}..{prefill[1]:.0f}",
        f"{row['decode_tokens_per_s']:.1f}",
        f"{decode[0]:.1f}..{decode[1]:.1f}",
        f"{row['weight_bytes_per_step'] / 1e6:.0f}",
        f"{row['read_bytes_per_s'] / 1e9:.1f}",
        f"{row['share_of_read_limit']:.0%}",
        f"{row['load_s']:.2f}",
        f"{row['peak_rss_mb']:.0f}",
        *([f"{row['largest_rss_mb']:.0f}"] if workers else []),
    )
