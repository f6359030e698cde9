"""`llmc compile`: a model on disk becomes an artifact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from llmc.console import (
    json_option,
    need_compiler,
    print_json,
    print_table,
    progress_bars,
    words_for_bytes,
    words_for_loss,
)

# Spelled out here so that --help needs no compiler; a test compares them with the compiler's own lists.
QUANTS = ("auto", "f32", "bf16", "q8", "q8_b32", "q6", "q5", "q4", "q4_b64", "q3h", "q3", "q2",
          "c6", "c5", "c4", "c3h", "c3", "c2h", "c2", "r8", "r6", "r5", "r4", "r3h")  # fmt: skip
KV_KINDS = ("auto", "f32", "bf16", "q8", "q4")


def target_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the names unchanged; the driver knows which `cpu:NAME` and `cuda:NAME` exist."""
    for name in value.split(","):
        kind, colon, rest = name.strip().partition(":")
        if kind not in ("cpu", "cuda") or ((colon or kind == "cuda") and not rest):
            message = f"{name!r} is no target. Use cpu, cpu:portable, cpu:NAME or cuda:sm_NN, or several with commas."
            raise click.BadParameter(message, context, parameter)
    return value


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Return the bytes that "80MB", "1.5 GiB" or "12345678" stand for."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[KMG]i?B|B)", value.strip(), re.IGNORECASE)
    if found is None or len(value) > 30:
        raise click.BadParameter(f"{value!r} is no size. Use for example 80MB or 1.5GB.", context, parameter)
    unit = found[2].upper()
    base = 1024 if "I" in unit else 1000
    return int(float(found[1]) * base ** " KMG".index(unit[:1] if unit[:1] in "KMG" and unit else " "))


@click.command(
    "compile",
    short_help="Compile a model into an artifact.",
    epilog="""\b
Examples:
  llmc compile SmolLM2-135M-Instruct.gguf -o smollm2.llmc
  llmc compile ./llama-folder -o llama.llmc --quant c4 --kv bf16
  llmc compile ./llama-folder -o small.llmc --bpw 3.5 --calib text.txt
  llmc compile model.gguf -o anywhere.llmc --target cpu:portable
  llmc compile model.gguf -o fast.llmc --tuned tuned.json
  llmc compile model.gguf -o gpu.llmc --target cuda:sm_90
  llmc compile model.gguf -o either.llmc --target cuda:sm_90,cpu:portable
  llmc compile model.onnx -o graph.llmc

\b
Formats, with bits per weight:
  f32 32 · bf16 16 · q8 8.5: near enough to the original
  c6 6.3 · c5 5.3 · c4 4.3 · c3h 3.8 · c3 3.3 · c2h 2.8 · c2 2.3: codebooks, the best at their size
  r8 8.1 · r6 6.1 · r5 5.1 · r4 4.1 · r3h 3.6: rotated, for CPUs; the fastest prompts and batches
  q8_b32 9 · q6 6.5 · q5 5.5 · q4 5 · q4_b64 4.5 · q3h 4 · q3 4 · q2 3: evenly spaced steps""",
)
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", required=True, metavar="NAME.llmc", help="The folder to write.")
@click.option(
    "--quant",
    type=click.Choice(QUANTS),
    metavar="FORMAT",
    default="auto",
    show_default=True,
    help="How weights are stored; auto keeps what the model file has quantized already, and makes floats q8.",
)
@click.option("--bpw", type=float, metavar="X", help="Choose formats by measurement: at most X bits per weight.")
@click.option("--size", callback=_size, metavar="SIZE", help="The same: at most SIZE of weights, as 80MB.")
@click.option("--recipe", metavar="FILE", help="A TOML file with the format of each matrix.")
@click.option("--save-recipe", metavar="FILE", help="Write the formats chosen to a TOML file for --recipe.")
@click.option("--calib", metavar="TEXT", help="A text file the model reads to learn which errors matter.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the parts of the calibration text.")
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare the result with the unquantized model (4 bytes of memory a weight).",
)
@click.option(
    "--equalize/--no-equalize",
    default=True,
    show_default=True,
    help="Scale columns by what a short text, or --calib, puts in front of them: rounding loses about half as much.",
)
@click.option(
    "--activations",
    type=click.Choice(["auto", "i8", "f32", "bf16"]),
    default="auto",
    show_default=True,
    help="What quantized weights are multiplied with. auto: int8 on CPUs, bf16 on GPUs; f32: exact, and slower. On a "
    "CPU with AMX bf16 reads prompts faster and decodes slower; on others it is as slow as f32.",
)
@click.option(
    "--kv",
    type=click.Choice(KV_KINDS),
    default="auto",
    show_default=True,
    help="How keys and values are stored; auto: bf16, or f32 beside f32 weights.",
)
@click.option(
    "--target",
    callback=target_name,
    metavar="TARGET",
    default="cpu",
    show_default=True,
    help="cpu: this machine's instructions; cpu:portable: any machine of this architecture; cpu:x86_64, cpu:aarch64; "
    "cuda:sm_80, sm_86, sm_89, sm_90: an NVIDIA GPU (docs/cuda.md); alone it implies --no-check. Several with commas.",
)
@click.option(
    "--tvm-runtime",
    metavar="FILE",
    help="TVM's runtime for a target of another architecture: an apache-tvm wheel, or libtvm_runtime.so.",
)
@click.option(
    "--layer-groups",
    type=int,
    metavar="N",
    help="Compile the layers in N groups too, for prompts that are read a group a step (docs/engine.md).",
)
@click.option(
    "--devices",
    metavar="STRING",
    help="Cut the model for several devices, '0&1' by tensor, '0;1' by layer (docs/partition.md); implies --no-check.",
)
@click.option("--split", metavar="N:N", help="How much each device takes, as 3:1; equal parts unless given.")
@click.option("--tuned", metavar="DB.json", help="Use the knobs that `llmc tune` found; others as shipped.")
@click.option("--revision", metavar="NAME", help="Of a model hf:org/name: its branch, tag or commit.")
@click.option("--spec", metavar="FILE", help="A TOML spec to use instead of the model's own.")
@json_option
def compile_command(
    source: str, output: str, save_recipe: str | None, revision: str | None, as_json: bool, **options: Any
) -> None:
    """Compile SRC into NAME.llmc.

    SRC is a GGUF file (the first of a split one), a Hugging Face folder with safetensors or PyTorch weights, a
    llama2.c file, or hf:org/name (hf:org/name:FILE.gguf), which is fetched first. A file that ends in .onnx or .pt2 is
    a graph, compiled as it is and run on arrays; with --spec, an ONNX file is only where the weights are.
    """
    need_compiler("compile")
    from llmc.runtime.loading.library import without_torch

    with without_torch():
        from llmc.compiler.driver import compile_model

    if revision is not None:
        from llmc.frontends.hub import with_revision

        source = with_revision(source, revision)
    if save_recipe is not None and not Path(save_recipe).resolve().parent.is_dir():
        raise click.ClickException(f"{save_recipe}: its folder does not exist")
    if options["devices"] is not None or "cpu" not in options["target"]:
        options["check"] = False
    with progress_bars() as progress:
        result = compile_model(source, output, progress=progress, **options)
    if save_recipe is not None:
        from llmc.compiler.driver.recipe import recipe_text

        Path(save_recipe).write_text(recipe_text(result.formats), encoding="utf-8")
    if as_json:
        print_json(
            {
                "path": str(result.path),
                "seconds": result.seconds,
                "bytes": result.bytes,
                "bits_per_weight": result.bits_per_weight,
                "format": result.format,
                "loss": result.loss and result.loss.as_dict(),
                "tuned": result.tuned,
                "slow": list(result.slow),
            }
        )
        return
    rows = [
        ("artifact", str(result.path)),
        ("weights", f"{result.format}, {result.bits_per_weight:.2f} bits per weight"),
        ("size", words_for_bytes(result.bytes)),
        ("time", f"{result.seconds:.1f} s"),
    ]
    if result.loss is not None:
        rows.insert(2, ("expected loss", words_for_loss(result.loss.as_dict())))
    if result.tuned is not None:
        rows.append(("tuned", result.tuned))
    print_table(rows)
    if result.slow:
        click.secho(
            f"note: {', '.join(result.slow)}: an x86 CPU without AVX-512 VBMI looks these codes up slowly; with AVX2 a "
            "token takes two to three times as long as with q4. There q3h and q4 are quicker.",
            fg="yellow",
            err=True,
        )
    if result.loss is not None and result.loss.large:
        click.secho(
            "warning: this loss is large: answers will differ from the original's. Give more bits, or a calibration "
            "text (--calib), or let --bpw mix formats.",
            fg="yellow",
            err=True,
        )
