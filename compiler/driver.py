"""compile_model: model files -> graph -> passes -> weights and machine code -> artifact, read top to bottom."""

from __future__ import annotations

import importlib.metadata
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

import llmc.targets.target as targets
from llmc.compiler import artifact, pipeline
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS
from llmc.compiler.meaning import PAGE
from llmc.compiler.spec import ModelSpec, from_toml, tensor_shapes, to_dict

if TYPE_CHECKING:
    from llmc.compiler.evaluate import StoredWeight

Progress = Callable[[str, int, int], None]
KV_DTYPES = ("auto", "f32", "bf16")
PACKING_THREADS = 2  # packing is NumPy on large arrays, which runs without the interpreter lock


@dataclass(frozen=True)
class CompileResult:
    """What was made."""

    path: Path
    seconds: float
    bytes: int  # of the whole folder
    bits_per_weight: float  # of all stored tensors, scales, padding and norms included
    format: str


def compile_model(
    source: str | Path, output: str | Path, *, quant: str = "auto", kv: str = "auto", target: str = "cpu",
    spec: str | Path | None = None, progress: Progress | None = None,
) -> CompileResult:  # fmt: skip
    """Compile the model at `source` into the artifact folder `output`.

    `quant` is a name in `FORMATS`, or "auto" (see `default_format`); `kv` "auto" stores keys and values as float32 for
    float32 weights, else bfloat16; `spec` is a TOML file that replaces the derived spec. Raises LlmcError, before any
    work, for what is not understood.
    """
    started = time.perf_counter()
    report = progress or (lambda stage, done, total: None)
    output = Path(output)
    chosen = _check(output, quant, kv, target)
    from llmc.frontends.source import open_model  # imports tvm and readers: only once the request makes sense

    report("read", 0, 1)
    model = open_model(source, None if spec is None else _read_spec(Path(spec)))
    try:
        report("read", 1, 1)
        quant = default_format(model) if quant == "auto" else quant
        kv_dtype = ("f32" if quant == "f32" else "bf16") if kv == "auto" else kv
        stored, step = _graph(model.spec, quant, kv_dtype, report)
        with artifact.new_artifact(output) as folder:
            weights = _write_weights(folder, stored, model, report)
            variant = _write_library(folder, step, chosen, report)
            report("write", 0, 1)
            manifest = _manifest(model, quant, kv_dtype, stored, weights, variant)
            _write_texts(folder, model, manifest)
            artifact.write_manifest(folder, manifest)
    finally:
        model.close()
    report("write", 1, 1)
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    bits = manifest["quantization"]["bits_per_weight"]
    return CompileResult(output, time.perf_counter() - started, size, bits, quant)


# Under 8 bits the vocabulary's table, which every token passes twice when tied, costs most quality per bit saved.
VOCABULARY = {"embedding": {"q4": "q8"}, "head": {"q4": "q8"}}


# Source types that a format of ours holds without loss, at their own size.
SAME_GRID = {"Q4_1": "q4"}


def default_format(model: Any) -> str:
    """The format for a source when none is asked for: its own grid if most of its bytes lie on one, else q8."""
    size: Counter[str] = Counter()
    for tensor in model.tensors.values():
        size[tensor.stored] += tensor.nbytes
    return SAME_GRID.get(size.most_common(1)[0][0], "q8")


def choose_format(quant: str, weight: str) -> str:
    """The format of one matrix when `quant` is asked for."""
    return VOCABULARY.get(weight, {}).get(quant, quant)


def _check(output: Path, quant: str, kv: str, target: str) -> targets.Target:
    if quant != "auto" and quant not in FORMATS:
        raise LlmcError(f"unknown weight format {quant!r}; llmc knows: auto, {', '.join(FORMATS)}")
    if kv not in KV_DTYPES:
        raise LlmcError(f"unknown KV format {kv!r}; llmc knows: {', '.join(KV_DTYPES)}")
    chosen = targets.get(target)
    if shutil.which(chosen.linker) is None:
        raise LlmcError(f"{chosen.linker} is needed to link code for {chosen.arch} and is not on PATH; install it")
    artifact.check_output(output)
    return chosen


def _read_spec(path: Path) -> ModelSpec:
    try:
        return from_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LlmcError(f"{path}: cannot read the spec: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise LlmcError(f"{path}: cannot read the spec: not UTF-8 text") from error
    except LlmcError as error:
        raise LlmcError(f"{path}: {error}") from error


def _graph(spec: ModelSpec, quant: str, kv_dtype: str, report: Progress) -> tuple[list[StoredWeight], Any]:
    """The stored weights, in the order the step takes them, and the module of the step alone."""
    from llmc.compiler.evaluate import stored_weights
    from llmc.frontends.build import build
    from llmc.passes import lift_weights
    from llmc.passes.pipeline import stages

    module = pipeline.run(stages(partial(choose_format, quant)), build(spec, kv_dtype), report)
    names = list(tensor_shapes(spec))
    stored = list(stored_weights(module[lift_weights.TRANSFORM], names))
    return stored, lift_weights.bundle_weights(module)


def _write_weights(folder: Path, stored: list[StoredWeight], model: Any, report: Progress) -> dict[str, Any]:
    def read(name: str) -> NDArray[Any]:
        values: NDArray[Any] = model.tensors[name].read()
        return values

    def arrays() -> Iterator[NDArray[Any]]:
        """In order, computed a few ahead: memory holds `PACKING_THREADS` + 1 weights at most."""
        with ThreadPoolExecutor(PACKING_THREADS) as pool:
            ahead = [pool.submit(w.compute, read) for w in stored[:PACKING_THREADS]]
            for number in range(len(stored)):
                result = ahead.pop(0).result()
                if number + PACKING_THREADS < len(stored):
                    ahead.append(pool.submit(stored[number + PACKING_THREADS].compute, read))
                yield result

    path = folder / artifact.WEIGHTS
    return artifact.write_weights(path, stored, arrays(), lambda done: report("weights", done, len(stored)))


def _write_library(folder: Path, step: Any, target: targets.Target, report: Progress) -> dict[str, Any]:
    """Machine code for one target, and TVM's runtime beside it; the manifest's entry of the variant."""
    import tvm

    from llmc.targets.build import compile_module
    from llmc.targets.lower import lower

    report("library", 0, 2)
    lowered = lower(step, target)
    report("library", 1, 2)
    name = f"lib/{target.name}.so"
    compile_module(lowered, target).export_library(str(folder / name), cc=target.linker)
    shutil.copyfile(Path(tvm.__file__).parent / "lib" / "libtvm_runtime.so", folder / "lib" / "libtvm_runtime.so")
    report("library", 2, 2)
    return {"file": name, "name": target.name, "arch": target.arch, "requires": list(target.requires)}


def _write_texts(folder: Path, model: Any, manifest: dict[str, Any]) -> None:
    (folder / manifest["tokenizer"]).write_bytes(model.tokenizer_json)
    if manifest["chat_template"]:
        (folder / manifest["chat_template"]).write_text(model.chat_template, encoding="utf-8")


def _manifest(
    model: Any, quant: str, kv_dtype: str, stored: list[StoredWeight], weights: dict[str, Any], variant: dict[str, Any]
) -> dict[str, Any]:
    spec: ModelSpec = model.spec
    kv_heads, head_dim = spec.attention.kv_heads, spec.attention.head_dim
    source_weights = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    return {
        "name": spec.name,
        "spec": to_dict(spec),
        "vocab": spec.sizes.vocab,
        "context": spec.sizes.context,
        "kv": {
            "layers": spec.sizes.layers, "kv_heads": kv_heads, "head_dim": head_dim, "page_tokens": PAGE,
            "dtype": kv_dtype, "page_shape": [2, kv_heads, head_dim * PAGE],
        },
        "quantization": {
            "format": quant,
            "bits_per_weight": round(8 * sum(w.nbytes for w in stored) / source_weights, 4),
            "tensors": dict(Counter(w.format for w in stored)),
            "source": dict(Counter(tensor.stored for tensor in model.tensors.values())),
        },
        "variants": [variant],
        "runtime": "lib/libtvm_runtime.so",
        "weights": weights,
        "tokens": {
            "bos": spec.tokens.bos, "eos": list(spec.tokens.eos), "add_bos": spec.tokens.add_bos,
            "special": model.special_tokens,
        },
        "chat_template": "chat_template.jinja" if model.chat_template else None,
        "tokenizer": "tokenizer.json",
        "generation": model.generation,
        "compiler": {
            "llmc": importlib.metadata.version("llmc"), "tvm": importlib.metadata.version("apache-tvm"),
        },
    }  # fmt: skip
