"""`llmc plan --measure`: this machine's cores as devices, each read, computed and talked with, as a devices file."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from llmc.console import need_compiler

_NEAR, _FAR, _NEW = 16, 768, 48  # tokens of the prompts, and of the answers, that artifacts are timed with
_BATCH = 8  # queries at once
_SECONDS = 120  # for two processes to exchange their messages
_SHARE = 0.9  # of a core's part of the memory: the rest is the system's


def measure_here(artifacts: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """A devices file for this machine, a device for each core that this process may use, and what was measured.

    Raises ClickException where an artifact cannot be timed.
    """
    from llmc.cli_bench import worker
    from llmc.cli_doctor import collect

    if artifacts:
        need_compiler("plan --measure --artifact")  # its formats' sizes
    cores = collect()["cpu"]["cores_allowed"]
    one = worker({"only_read": True, "threads": 1})["read_bytes_per_s"]
    together = worker({"only_read": True, "threads": cores})["read_bytes_per_s"] if cores > 1 else one
    facts: dict[str, Any] = {"cores": cores, "read": one, "together": max(together, one), "f32": multiply_rate()}
    facts["memory"] = _SHARE * (collect()["memory"]["available"] or 4e9) / cores
    facts["link"] = messages() if cores > 1 else None
    fitted = _fitted(artifacts, one, facts["f32"])
    facts |= (
        asdict(fitted)
        if fitted
        else {"ops": {"f32": facts["f32"]}, "streams": {}, "layer_s": 0.0, "row_s": 0.0, "exposed": 0.0}
    )
    facts["words"] = _words(facts, artifacts)
    return devices_text(facts), facts


def multiply_rate() -> float:
    """Operations a second of NumPy's float32 matrices on one thread."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((512, 1024), np.float32), rng.standard_normal((1024, 1024), np.float32)
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        x @ y
        best = max(best, 2.0 * 512 * 1024 * 1024 / (time.perf_counter() - start))
    return best


def messages() -> dict[str, float] | None:
    """What runtime/workers/pingpong.py measures between two processes; None where there is no MPI."""
    import sys

    from llmc.runtime.errors import ArtifactError
    from llmc.runtime.workers.launch import mpirun

    try:
        command = [*mpirun(), "-n", "2", sys.executable, "-m", "llmc.runtime.workers.pingpong"]
    except ArtifactError:
        return None
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"two processes with MPI between them did not end in {_SECONDS} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise click.ClickException(f"mpirun: {lines[-1] if lines else f'ended with {done.returncode}'}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _fitted(artifacts: Sequence[str], read: float, f32: float) -> Any:
    """What explains the artifacts' times; None without one."""
    if not artifacts:
        return None
    from llmc.passes.plan.fit import fit

    return fit([timed(path) for path in artifacts], read, f32)


def timed(path: str) -> Any:
    """The times of an artifact's steps on one thread."""
    from llmc.cli_bench import worker
    from llmc.passes.plan.fit import Timed
    from llmc.plan_options import open_planned

    if not (Path(path) / "manifest.json").is_file():
        raise click.ClickException(f"{path}: no artifact; give a folder that `llmc compile` wrote")
    planned = open_planned(path, "auto", "auto")
    context = planned.model.spec.sizes.context
    far = min(_FAR, context - _NEW - 1)
    if planned.model.spec.encoder is not None or far < 2 * _NEAR:
        raise click.ClickException(f"{path}: wanted a model that goes on with a prompt of {2 * _NEAR} tokens at least")
    case = {"artifact": path, "threads": 1, "batch": 1, "new_tokens": _NEW, "repeats": 3}
    near, deep = (worker({**case, "prompt_tokens": tokens}) for tokens in (_NEAR, far))
    many = worker({**case, "prompt_tokens": _NEAR, "batch": _BATCH})

    def step(row: dict[str, Any], tokens: int) -> tuple[float, float]:
        return tokens + _NEW / 2, 1 / float(np.median(row["decode"]))

    prompt = min(far, 512)  # a step's worth of rows: longer prompts are read in several
    return Timed(
        planned.model, step(near, _NEAR), step(deep, far), (prompt, prompt / float(np.median(deep["prefill"]))),
        (_BATCH, _BATCH / float(np.median(many["decode"]))),
    )  # fmt: skip


def devices_text(facts: dict[str, Any]) -> str:
    """The file."""
    link, cores = facts["link"] or {}, facts["cores"]
    lines = ['name = "here"', "", "[[node]]", 'all_reduce = "gather"', f"together_gb_s = {facts['together'] / 1e9:.2f}"]
    if link:
        lines += [
            f"latency_us = {link['latency_s'] * 1e6:.1f}", f"wake_us = {link['wake_s'] * 1e6:.1f}",
            f"gb_s = {link['bytes_per_s'] / 1e9:.2f}",
        ]  # fmt: skip
    elif cores > 1:
        lines += ["latency_us = 30  # not measured: no MPI here", "gb_s = 4"]
    ops = ", ".join(f"{kind} = {rate / 1e9:.1f}" for kind, rate in facts["ops"].items())
    lines += [
        "", "[[node.device]]", 'name = "0"', f"count = {cores}", f"memory_gb = {facts['memory'] / 1e9:.2f}",
        "taken_gb = 0.1", f"read_gb_s = {facts['read'] / 1e9:.2f}", f"gops = {{ {ops} }}",
        f"layer_us = {facts['layer_s'] * 1e6:.1f}", f"row_us = {facts['row_s'] * 1e6:.1f}",
        f"exposed = {facts['exposed']:.3f}", f"unsteady = {link.get('unsteady', 0.0):.3f}",
    ]  # fmt: skip
    if facts["streams"]:
        streams = ", ".join(f"{name} = {rate / 1e9:.2f}" for name, rate in facts["streams"].items())
        lines.append(f"stream_gb_s = {{ {streams} }}")
    return "\n".join(lines) + "\n"


def _words(facts: dict[str, Any], artifacts: Sequence[str]) -> list[tuple[str, str]]:
    link = facts["link"]
    rows = [
        ("cores", f"{facts['cores']}, each a device"),
        ("reads", f"{facts['read'] / 1e9:.1f} GB/s, {facts['together'] / 1e9:.1f} GB/s all at once"),
        ("computes", ", ".join(f"{kind} {rate / 1e9:.0f} Gop/s" for kind, rate in facts["ops"].items())),
    ]
    if link:
        rows.append(
            (
                "messages",
                f"{link['latency_s'] * 1e6:.0f} us, {link['bytes_per_s'] / 1e9:.1f} GB/s, "
                f"{link['wake_s'] * 1e6:.0f} us to wake, times vary by {link.get('unsteady', 0.0):.0%}",
            )
        )
    else:
        rows.append(("messages", "not measured: no MPI here"))
    if artifacts:
        streams = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in facts["streams"].items())
        costs = f"{facts['layer_s'] * 1e6:.0f} us a layer, {facts['row_s'] * 1e6:.0f} us a token"
        rows.append(("artifacts", f"{streams}, {costs}, {facts['exposed']:.0%} of products beside reading seen"))
    else:
        rows.append(("artifacts", "none timed: int8 rates and the cost of a layer are not known (--artifact)"))
    return rows
