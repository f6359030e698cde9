"""llama.cpp's own quantizations of a model, with and without an importance matrix, against its float32 weights.

    python tests/bench/peer_formats.py MODEL.gguf --peer OTHER/bin/python --output rows.json

OTHER is an interpreter that has llama-cpp-python. Every tensor of MODEL is dequantized to float32 first: the reference,
and the source of every quantization. The importance matrix comes from one novel, the figures from another (texts.py),
cut into windows by llmc's tokenizer: as `llmc eval` cuts them, so its figures compare with these.

`quantize_matrix` quantizes one matrix, in this process, through the library that LLMC_PEER_LIB names.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "bench")]

import texts
from rich.console import Console
from rich.table import Table

import llmc
from llmc.compiler.driver import compile_model
from llmc.runtime.quality import WINDOW, windows

HERE = ROOT / "tests" / "bench"
FORMATS = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
PROMPT, NEW = 64, 48  # tokens of the speed measurement
LIBRARY = "LLMC_PEER_LIB"  # names libggml-base.so, or the folder it is in


def quantize_matrix(
    values: NDArray[np.float32], kind: str, importance: NDArray[np.float32] | None = None, library: str | None = None
) -> NDArray[np.uint8]:
    """(N, K) float32 -> (N, bytes of a row) blocks as GGUF stores them, by llama.cpp's ggml_quantize_chunk.

    kind: a tensor type, such as Q3_K or IQ4_NL (a file type such as Q3_K_M is a mixture of those). importance: (K,)
    weights of the columns' squared errors, 0 or more. library: see LLMC_PEER_LIB. Raises ValueError for a K that is
    not whole blocks, or a kind that cannot do without importance.
    """
    quant = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    rows, columns = values.shape
    if columns % block:
        raise ValueError(f"{kind}: rows of {columns} values are not whole blocks of {block}")
    if importance is not None and importance.shape != (columns,):
        raise ValueError(f"importance: got shape {importance.shape}, wanted ({columns},)")
    ggml = _library(library or os.environ.get(LIBRARY, ""))
    if importance is None and ggml.ggml_quantize_requires_imatrix(quant):
        raise ValueError(f"{kind} needs importance")
    source = np.ascontiguousarray(values, np.float32)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    out = np.empty((rows, columns // block * block_bytes), np.uint8)
    written = ggml.ggml_quantize_chunk(
        quant, source.ctypes.data, out.ctypes.data, 0, rows, columns, None if weights is None else weights.ctypes.data
    )
    assert written == out.nbytes
    return out


@functools.lru_cache
def _library(given: str) -> Any:
    if not given:
        raise ValueError(f"set {LIBRARY} to llama.cpp's libggml-base.so, or to its folder")
    path = Path(given)
    ggml = ctypes.CDLL(str(path / "libggml-base.so" if path.is_dir() else path))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, wide = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, wide, wide, wide, pointer]
    ggml.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    ggml.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    return ggml


def write_float32(source: Path, output: Path, dither: int | None = None) -> None:
    """Write a GGUF file again with every tensor as float32, its metadata copied.

    With a seed `dither`, weights that were quantized are moved off the grid they lie on, see `dithered`.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE)
    assert architecture is not None
    writer = gguf.GGUFWriter(output, architecture.contents())
    ours = {gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE, gguf.Keys.General.QUANTIZATION_VERSION}
    for field in reader.fields.values():
        if field.name not in ours and not field.name.startswith("GGUF."):
            part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=part)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = None if dither is None else np.random.default_rng(dither)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.tensor_type.name
        if random is not None and kind.startswith("Q"):
            values = dithered(values, int(kind[1]), random)
        writer.write_tensor_data(values)
    writer.close()


def dithered(values: NDArray[np.float32], bits: int, random: np.random.Generator) -> NDArray[np.float32]:
    """(N, K) values of 2**bits levels in each 32 columns, each moved by up to half the distance of two levels.

    Weights read from a quantized file lie on that format's grid: the same format, and any finer one of its kind, would
    find it again and lose nothing, which says nothing about weights that come from training. These lie on no grid.
    """
    blocks = values.reshape(-1, 32)
    step = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / (2**bits - 1)
    moved = blocks + step * (random.random(blocks.shape, np.float32) - np.float32(0.5))
    return moved.reshape(values.shape).astype(np.float32)


def stored(path: Path) -> dict[str, Any]:
    """Bytes and bits per weight of all tensors, and how many tensors and weights each type has."""
    types: dict[str, dict[str, int]] = {}
    tensors = gguf.GGUFReader(path).tensors
    for tensor in tensors:
        entry = types.setdefault(tensor.tensor_type.name, {"tensors": 0, "weights": 0})
        entry["tensors"] += 1
        entry["weights"] += int(tensor.n_elements)
    size, weights = sum(int(t.n_bytes) for t in tensors), sum(int(t.n_elements) for t in tensors)
    ragged = sum(int(t.n_elements) for t in tensors if len(t.shape) > 1 and t.shape[0] % gguf.constants.QK_K)
    facts = {"bytes": size, "weights": weights, "bits_per_weight": 8 * size / weights, "types": types}
    return {**facts, "weights_in_rows_not_of_256": ragged}


def write_windows(artifact: Path, text: Path, count: int, output: Path) -> None:
    """Write the first `count` windows of a text as JSON, as `llmc eval` cuts them: ids, after a first token if any."""
    with llmc.load(artifact) as model:
        ids, first = model.encode(text.read_text(encoding="utf-8")), model.encode("")
    cut = windows(ids[len(first) :], WINDOW, first[0] if first else None)[:count]
    output.write_text(json.dumps(cut.tolist()))


def _peer(options: argparse.Namespace, script: str, request: dict[str, Any]) -> str:
    command = [options.peer, str(HERE / script), json.dumps(request)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _once(path: Path, make: Callable[[Path], object]) -> Path:
    """Make `path` unless it is there; in one step, so that what is there is whole."""
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            new = Path(folder) / path.name
            make(new)
            new.replace(path)
    return path


def _prepare(options: argparse.Namespace, work: Path) -> tuple[Path, Path, Path]:
    """Make (float32 model, importance matrix, windows to measure on)."""
    reference = _once(work / "f32.gguf", lambda new: write_float32(options.model, new, options.dither))
    counts = (options.calibration_windows, options.windows)
    paths = [work / f"{use}-{count}.json" for use, count in zip(("calibration", "evaluation"), counts, strict=True)]
    if not all(path.exists() for path in paths):
        artifact = options.artifact
        if artifact is None:
            artifact = work / "tokenizer.llmc"
            compile_model(options.model, artifact)
        for path, text, count in zip(paths, texts.split(), counts, strict=True):
            write_windows(artifact, text, count, path)
    request = {"source": str(reference), "windows": str(paths[0]), "threads": options.threads}
    importance = _once(
        work / f"importance-{counts[0]}.npz",
        lambda new: _peer(options, "peer_quantize.py", {**request, "imatrix": str(new)}),
    )
    return reference, importance, paths[1]


def _rows(options: argparse.Namespace, work: Path, console: Console) -> list[dict[str, Any]]:
    reference, importance, ids = _prepare(options, work)
    rows: list[dict[str, Any]] = [{"name": "F32", "imatrix": False, "path": reference}]
    for imatrix in (False, True):
        for kind in options.formats:
            request = {"source": str(reference), "quantize": kind}
            if imatrix:
                request["imatrix_from"] = str(importance)
            path = _once(
                work / f"{kind}{f'-imatrix-{options.calibration_windows}' if imatrix else ''}.gguf",
                lambda new, request=request: _peer(options, "peer_quantize.py", {**request, "output": str(new)}),
            )
            rows.append({"name": kind, "imatrix": imatrix, "path": path})
            console.print(path.name)
    for row in rows:
        row |= {**stored(row["path"]), "tensors_sha256": _tensors_sha256(row["path"])}
    distinct = {row["tensors_sha256"]: str(row["path"]) for row in rows}  # Q8_0 makes no use of importance
    figures = _figures(options, distinct, reference, ids)
    speeds = {name: _speed(options, path, json.loads(ids.read_text())[0]) for name, path in distinct.items()}
    for row in rows:
        row |= {**figures[row["tensors_sha256"]], "decode": speeds[row["tensors_sha256"]], "path": row["path"].name}
    return rows


def _figures(options: argparse.Namespace, models: dict[str, str], reference: Path, ids: Path) -> dict[str, Any]:
    """Figures of each model (its tensors' SHA-256 -> its path); kept, so that only new models are measured."""
    kept = ids.with_name(f"figures-{ids.stem}.json")
    figures: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    missing = [name for name in models if name not in figures and models[name] != str(reference)]
    for start in range(0, len(missing), options.together):
        batch = {name: models[name] for name in missing[start : start + options.together]}
        request = {"reference": str(reference), "models": batch, "windows": str(ids), "threads": options.threads}
        figures |= json.loads(_peer(options, "peer_eval.py", request))
        figures |= {name: figures["reference"] for name in models if models[name] == str(reference)}
        kept.write_text(json.dumps(figures))
    return figures


def _tensors_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for tensor in gguf.GGUFReader(path).tensors:
        digest.update(np.ascontiguousarray(tensor.data))
    return digest.hexdigest()


def _speed(options: argparse.Namespace, path: str, ids: list[int]) -> float:
    """Decoded tokens per second, the best of the repeats: others may be using the machine."""
    asks = [{"prompts": [ids[:PROMPT]], "new": NEW}] * 3
    request = {"model": path, "threads": options.speed_threads, "cpu_time": False, "asks": asks}
    command = [options.peer, str(HERE / "peer_llamacpp.py")]
    done = subprocess.run(command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True)
    times = json.loads(done.stdout.splitlines()[-1])["times"]
    return max((NEW - 1) / (each[-1] - each[0]) for each in times)  # the first step reads the prompt


def main() -> None:
    """Quantize, measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file of any types")
    parser.add_argument("--peer", required=True, help="python that can import llama_cpp")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--artifact", type=Path, help="the model compiled by llmc, for its tokenizer")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens, to measure on")
    parser.add_argument("--calibration-windows", type=int, default=64)
    parser.add_argument("--dither", type=int, metavar="SEED", help="first move the weights off their file's grid")
    parser.add_argument("--threads", type=int, default=1, help="but for speed; threads that wait for others spin")
    parser.add_argument("--speed-threads", type=int, default=2)
    parser.add_argument("--together", type=int, default=14, help="models held in memory at a time")
    options = parser.parse_args()
    console = Console(width=140)
    work = ROOT / "build" / "bench" / f"peer-{options.model.stem}"
    if options.dither is not None:
        work = work.with_name(f"{work.name}-dither-{options.dither}")
    work.mkdir(parents=True, exist_ok=True)
    rows = _rows(options, work, console)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table(title=f"{options.model.stem}: llama.cpp against float32, {rows[0]['tokens']} tokens")
    heads = "format|imatrix|bits/weight|perplexity|KL mean|KL 99 %|same first choice|decode tok/s|types (tensors)"
    for head in heads.split("|"):
        table.add_column(head, justify="left" if head.startswith(("format", "types")) else "right")
    for row in rows:
        types = " ".join(f"{name}:{entry['tensors']}" for name, entry in row["types"].items())
        table.add_row(
            row["name"], "yes" if row["imatrix"] else "", f"{row['bits_per_weight']:.3f}", f"{row['perplexity']:.3f}",
            f"{row['kl']:.5f}", f"{row['kl_99']:.4f}", f"{row['top1']:.2%}", f"{row['decode']:.0f}", types,
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
