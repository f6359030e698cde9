"""Makes the folder that tests/gpu/run_all.sh needs: all that takes a compiler or the network is done here.

    python tests/gpu/pack.py build/gpu [--chip sm_90] [--seed N]

kernels/: a library of kernels, with inputs and results of every case. models/: small models of several structures, each
for the CPU and for the chip. shapes/: a model of 7 billion weights in several formats, without the weights. wheels/:
llmc, and what its runtime needs. Copy the checkout with the folder to the machine that has the GPU, and run the script.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("gpu", "", "targets", "cuda", "end_to_end")]

import shapes
from attention_cases import ATTENTION_CASES, DEVICE_CASES, attention, on_tensor_cores
from expert_cases import EXPERT_CASES
from kernel_cases import CASES, Case, embedding_case, floats, linear_case, packed
from latent_kernel_cases import LATENT_CASES
from packaging.requirements import Requirement
from tvm import sym, tirx

from llmc.compiler import meaning
from llmc.compiler.driver import compile_model
from llmc.compiler.driver.tvm_runtime import CUDA_RUNTIME, RUNTIME, copy_runtime, find_runtime
from llmc.compiler.formats import FORMATS, from_bf16
from llmc.compiler.kv_pages import KINDS as PAGE_KINDS
from llmc.compiler.ops import OPS, rounded
from llmc.compiler.ops.narrowed import after_linear
from llmc.compiler.ops.rounded import ENDING
from llmc.targets.cuda.build import compile_kernels
from llmc.targets.cuda.lower import ADD_PARTS, KERNELS, add_parts, make_kernel
from llmc.targets.cuda.target import CUDA_TARGETS, CudaTarget
from llmc.targets.cuda.workspace import with_workspaces

SHAPES = {  # of 7 billion weights: how they are compiled
    "bf16": {"quant": "bf16"},
    "q8": {"quant": "q8"},
    "q4": {"quant": "q4"},
    "q4-f32": {"quant": "q4", "activations": "f32"},
    "q3h": {"quant": "q3h"},
}
ROUNDED = ("bf16", "q4", "q6", "c3h", "r4")  # weights that linear layers of rounded x are checked with
SEEDS = 3  # cases of each op
PROMPTS = (
    "The capital of France is", "Once upon a time", "Water boils at", "The first president of the United States was",
    "def add(a, b):", "To make a cup of tea,", "The opposite of hot is", "In 1969, people first", "My favourite season",
    "List the days of the week:", "A triangle has", "Photosynthesis is", "The largest ocean is", "Dear Sir or Madam,",
    "Shakespeare wrote", "The sun rises in the", "If it rains tomorrow,", "One, two, three,", "The recipe needs flour,",
    "Computers are",
)  # fmt: skip
PYTHONS = ("3.10", "3.11", "3.12", "3.13")  # that the machine with the GPU may have
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
EVERY = CASES | EXPERT_CASES | LATENT_CASES | ATTENTION_CASES | DEVICE_CASES


def kernel_cases(seed: int, seeds: int, formats: Collection[str]) -> Iterator[tuple[str, Case]]:
    """Names and cases: every op at random sizes, linear layers and look-ups in these formats, long texts.

    What gives bfloat16 at once, alone or with the matrix before it, as well.
    """
    for op in sorted(set(KERNELS) & set(EVERY)):
        for number in range(seeds):
            yield f"{op}_{number}", EVERY[op](np.random.default_rng([seed, number, len(op)]))
    for kind in PAGE_KINDS:
        rng = np.random.default_rng([seed, len(kind)])
        lengths = [(int(rng.integers(200, 400)), new) for new in (1, 8, 40)]  # chunks of slots; few rows and many
        yield f"attention_{kind}", attention(rng, kind, lengths=lengths, head_dim=128, causal=1, window=0)
    for name in formats:
        rng = np.random.default_rng([seed, len(name)])
        for op in ["packed_linear", *(["bf16_linear"] if name in ROUNDED else [])]:
            yield f"{op}_{name}_many_rows", linear_case(rng, op, name, 150)
            case = linear_case(rng, op, name, 19)
            yield f"{op}_{name}", case
            one = [a[1:2].copy() if i in case.symbolic else a for i, a in enumerate(case.arrays)]
            yield f"{op}_{name}_one_row", replace(case, arrays=one)
        yield f"packed_embedding_{name}", embedding_case(rng, name)
    for op in rounded.ROUNDED:
        rng = np.random.default_rng([seed, *map(ord, op)])
        case = EVERY[op](rng)
        while _last_width(case) % 2:
            case = EVERY[op](rng)
        yield f"rounded_{op}", replace(case, op=op + ENDING)
    for name in [name for name in ROUNDED if name in formats]:
        rng = np.random.default_rng([seed, *map(ord, name)])
        x, weight = meaning.round_rows(floats(rng, 150, 640)), packed(rng, name, 192, 640)
        attrs = {"format": name, "width": 192, "activation": "silu"}
        for rows in (150, 19, 5, 1):
            case = Case(after_linear(rounded.LINEAR, "gated" + ENDING), [x[:rows].copy(), weight], attrs, (0,))
            yield f"{case.op}_{name}_{rows}", case


def _last_width(case: Case) -> int:
    """Of the last result of an op."""
    given = OPS[case.op].meaning(*(array.copy() for array in case.arrays), **case.attrs)
    return int((given[-1] if isinstance(given, tuple) else given).shape[-1])


def write_kernels(
    folder: Path, target: CudaTarget, seed: int, seeds: int = SEEDS, formats: Collection[str] = FORMATS
) -> int:  # fmt: skip
    """kernels.so, a file for each case, and cases.json; how many there are."""
    folder.mkdir(parents=True)
    functions: dict[str, Any] = {}
    entries = []
    for name, case in kernel_cases(seed, seeds, formats):
        after = [array.copy() for array in case.arrays]
        given = OPS[case.op].meaning(*after, **case.attrs)
        outputs = list(given) if isinstance(given, tuple) else [given]
        functions[name], workspaces = _kernel(case, outputs, target)
        arrays = {f"before_{i}": array for i, array in enumerate(case.arrays)}
        arrays |= {
            f"after_{i}": a for i, a in enumerate(after) if not np.array_equal(a, case.arrays[i], equal_nan=True)
        }
        arrays |= {f"output_{i}": each for i, each in enumerate(outputs)}
        arrays |= {f"workspace_{i}": each for i, each in enumerate(workspaces)}
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        entries.append(
            {"op": case.op, "function": name, "file": f"{name}.npz", "tolerance": tolerance(case, outputs),
             "rounded": case.op.endswith(ENDING)}
        )  # fmt: skip
    module, _ = compile_kernels(functions | {ADD_PARTS: add_parts(target)}, target)
    module.export_library(str(folder / "kernels.so"))
    (folder / "cases.json").write_text(json.dumps(entries, indent=1))
    for name in (RUNTIME, CUDA_RUNTIME):
        copy_runtime(find_runtime(target.arch, None, name), folder, name)
    return len(entries)


def tolerance(case: Case, outputs: list[np.ndarray]) -> float:
    """Of the greatest number. Products of floats go in two parts of bfloat16 each (docs/cuda.md says how far off)."""
    if case.op.endswith(ENDING):  # as bfloat16 the next one may be as near
        plain = replace(case, op=case.op.removesuffix(ENDING))
        return 2.0**-8 + tolerance(plain, outputs)
    if case.op in ATTENTION_CASES | DEVICE_CASES:
        case = on_tensor_cores(case)
    if case.op not in ("packed_linear", "bf16_linear"):
        return 2 * case.tolerance
    x, weight = case.arrays
    pairs = case.op == rounded.LINEAR
    x = from_bf16(x.view(np.uint16)) if pairs else x
    sizes = np.abs(x) @ np.abs(FORMATS[case.attrs["format"]].stored(weight, int(case.attrs["width"]), x.shape[1])).T
    off = 2.0**-22 if pairs else 3 * 2.0**-18  # sums of floats that cancel; products of parts
    return 2 * case.tolerance + off * float(sizes.max() / np.abs(outputs[0]).max())


def _kernel(
    case: Case, outputs: list[np.ndarray], target: CudaTarget
) -> tuple[tirx.PrimFunc, list[np.ndarray]]:  # fmt: skip
    """The kernel for any number of rows; of each workspace that it takes besides, none: its shape and dtype."""
    names: dict[int, Any] = {}
    sizes: list[list[Any]] = []
    for i, array in enumerate([*case.arrays, *outputs]):
        first, *rest = array.shape
        symbolic = i in case.symbolic or (i >= len(case.arrays) and first in names)
        sizes.append([names.setdefault(first, tirx.Var(f"n{len(names)}", "int64")) if symbolic else first, *rest])
    made = with_workspaces(make_kernel(case.op, target, sizes, case.attrs))
    operands, own = made.params[: len(sizes)], made.params[len(sizes) :]
    known = sym.Analyzer()
    for operand, array in zip(operands, [*case.arrays, *outputs], strict=True):
        for size, got in zip(operand.shape, array.shape, strict=True):
            if isinstance(size, tirx.Var):
                known.bind(size, tirx.const(got, "int64"))
    return made, [np.empty([0, *(int(known.simplify(size)) for size in each.shape)], str(each.dtype)) for each in own]


def tiny_models(folder: Path) -> dict[str, tuple[Path, str, str]]:
    """Random models of the structures that tests/end_to_end/test_cuda.py compiles: name -> (folder, weights, pages)."""
    from conftest import save_tiny
    from test_cuda import MODELS

    for name, (config, _, _) in MODELS.items():
        (folder / name).mkdir()
        save_tiny(folder / name, name, config)
    return {name: (folder / name, quant, kv) for name, (_, quant, kv) in MODELS.items()}


def write_models(folder: Path, target: str, sources: dict[str, tuple[Path, str, str]]) -> None:
    """An artifact for the CPU and the chip of each source: (folder, format of weights, of pages); some of float32."""
    folder.mkdir(parents=True)
    for name, (source, quant, kv) in sources.items():
        print(f"models/{name}", flush=True)
        names = f"{target},cpu:portable"
        compile_model(source, folder / f"{name}.llmc", quant=quant, kv=kv, target=names, activations="f32")
        if kv == "bf16":  # whose rounding tells in small models: what they say without any
            floats = {"quant": "f32", "kv": "f32", "activations": "f32"}
            compile_model(source, folder / f"{name}.float", target="cpu:portable", **floats)


def write_demo(folder: Path, target: str) -> None:
    """The demo model for the CPU and the chip, and prompts: a real model, in the format that makes the least of it."""
    sys.path.insert(0, str(ROOT / "examples"))
    from fetch_smollm2 import fetch

    print("models/smollm2", flush=True)
    names = f"{target},cpu:portable"
    compile_model(fetch(), folder / "smollm2.llmc", quant="q3h", target=names, activations="f32")
    (folder / "smollm2.txt").write_text("\n".join(PROMPTS) + "\n")


def write_shapes(folder: Path, target: str, scratch: Path, tokenizer_json: bytes) -> dict[str, float]:
    """Artifacts of 7 billion weights, without the weights; seconds that each took to compile."""
    folder.mkdir(parents=True)
    shapes.write_folder(scratch, shapes.SEVEN_BILLION, tokenizer_json)
    seconds = {}
    for name, options in SHAPES.items():
        path = folder / f"llama-7b-{name}.llmc"
        seconds[name] = compile_model(scratch, path, target=target, **options).seconds
        shapes.strip(path)
    return seconds


def write_wheels(folder: Path) -> None:
    """llmc, and what its runtime needs beside NumPy, of the versions installed here, for every Python."""
    folder.mkdir(parents=True)
    needed = {Requirement(each).name for each in requires("llmc") or () if "extra" not in each}
    for name in list(needed):
        if name in ("jinja2", "rich"):
            needed |= {Requirement(each).name for each in requires(name) or () if "extra" not in each}
    needed |= {"mdurl"}  # markdown-it-py's own
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    named = [f"{name}=={version(name)}" for name in sorted(needed - {"numpy"})]
    platforms = [part for each in PLATFORMS for part in ("--platform", f"{each}_{platform.machine()}")]
    for python in PYTHONS:
        command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", *platforms]
        subprocess.run([*command, "--python-version", python, "--dest", str(folder), *named], check=True)


def main() -> None:
    """Make the pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--chip", default="sm_90")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    target = f"cuda:{options.chip}"
    count = write_kernels(options.pack / "kernels", CUDA_TARGETS[target], options.seed)
    print(f"{count} cases of kernels, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        sources = tiny_models(scratch)
        write_models(options.pack / "models", target, sources)
        write_demo(options.pack / "models", target)
        tokenizer_json = (next(iter(sources.values()))[0] / "tokenizer.json").read_bytes()
        seconds = write_shapes(options.pack / "shapes", target, scratch / "7b", tokenizer_json)
    print("7 billion weights compiled in " + ", ".join(f"{name}: {took:.0f} s" for name, took in seconds.items()))
    write_wheels(options.pack / "wheels")


if __name__ == "__main__":
    main()
