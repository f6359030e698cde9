"""What `llmc run` does with a graph: arrays from files in, arrays out as a table, JSON or files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from llmc.console import print_json, print_table, progress_bars

_MAX_PRINTED = 1 << 20  # values of all outputs that --json writes


def run_graph(
    artifact: str, inputs: tuple[str, ...], output_dir: str | None, threads: int | None, as_json: bool
) -> None:
    """Run the graph in `artifact` once on `NAME=FILE.npy` arrays."""
    import llmc.runtime

    folder = None if output_dir is None else Path(output_dir)
    if folder is not None and not folder.is_dir():
        raise click.ClickException(f"{folder}: no such folder; make it first")
    arrays = _read(inputs)
    with progress_bars() as progress:
        graph = llmc.runtime.load_graph(artifact, threads=threads, progress=progress)
    outputs = graph.run(arrays)
    files = {} if folder is None else _save(folder, outputs)
    if as_json:
        if folder is None and sum(value.size for value in outputs.values()) > _MAX_PRINTED:
            raise click.ClickException("outputs too large for --json; give --output-dir too, then files are named")
        print_json({"outputs": {name: _described(value, files.get(name)) for name, value in outputs.items()}})
        return
    rows = [
        (name, str(value.dtype), " x ".join(map(str, value.shape)), *_range(value), files.get(name, ""))
        for name, value in outputs.items()
    ]
    print_table(rows, ("output", "type", "shape", "least", "most", "file"))


def _read(inputs: tuple[str, ...]) -> dict[str, Any]:
    import numpy as np

    arrays: dict[str, Any] = {}
    for item in inputs:
        name, equals, path = item.partition("=")
        if not equals or not name or not path:
            raise click.UsageError(f"--input {item!r}: wanted NAME=FILE.npy.")
        if name in arrays:
            raise click.UsageError(f"--input {name!r} twice.")
        try:
            with Path(path).open("rb") as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError, MemoryError) as error:
            reason = (str(error).splitlines() or ["cut short"])[0]
            raise click.ClickException(f"{path}: not a .npy file of numbers: {reason[:120]}") from None
    return arrays


def _save(folder: Path, outputs: dict[str, Any]) -> dict[str, str]:
    """Write NAME.npy for each output; its file by name. Names become plain ones."""
    import numpy as np

    files: dict[str, str] = {}
    for name, value in outputs.items():
        plain = re.sub(r"[^0-9A-Za-z_.-]", "_", name).lstrip(".")[:100] or "output"
        while str(folder / f"{plain}.npy") in files.values():
            plain += "_"
        np.save(folder / f"{plain}.npy", value)
        files[name] = str(folder / f"{plain}.npy")
    return files


def _described(value: Any, file: str | None) -> dict[str, Any]:
    about: dict[str, Any] = {"dtype": str(value.dtype), "shape": list(value.shape)}
    return {**about, "file": file} if file is not None else {**about, "values": _plain(value.tolist())}


def _plain(value: Any) -> Any:
    """Numbers as JSON has them: null for what is not finite."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or value - value == 0 else None


def _range(value: Any) -> tuple[str, str]:
    if value.size == 0:
        return "", ""
    return f"{value.min():.6g}", f"{value.max():.6g}"
