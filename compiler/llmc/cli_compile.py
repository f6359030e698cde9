"""`llmc compile`: a model on disk becomes an artifact."""

from __future__ import annotations

import click

from llmc.console import (
    json_option,
    need_compiler,
    print_json,
    print_table,
    progress_bars,
    words_for_bytes,
)


def _target_name(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the name unchanged; the driver knows which `cpu:NAME` exist."""
    kind, colon, rest = value.partition(":")
    if kind != "cpu" or (colon and not rest):
        message = f"{value!r} is no target. Use cpu, cpu:portable or cpu:NAME."
        raise click.BadParameter(message, context, parameter)
    return value


@click.command(
    "compile",
    short_help="Compile a model into an artifact.",
    epilog="""\b
Examples:
  llmc compile SmolLM2-135M-Instruct.gguf -o smollm2.llmc
  llmc compile ./llama-folder -o llama.llmc --quant q4 --kv bf16
  llmc compile model.gguf -o anywhere.llmc --target cpu:portable""",
)
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", required=True, metavar="NAME.llmc", help="The folder to write.")
@click.option(
    "--quant",
    type=click.Choice(["auto", "f32", "bf16", "q8", "q4"]),
    default="auto",
    show_default=True,
    help="How weights are stored; auto: q4 for a Q4_1 file, which loses nothing, else q8.",
)
@click.option(
    "--kv",
    type=click.Choice(["auto", "f32", "bf16"]),
    default="auto",
    show_default=True,
    help="How keys and values are stored.",
)
@click.option(
    "--target",
    callback=_target_name,
    metavar="TARGET",
    default="cpu",
    show_default=True,
    help="cpu: this machine's instructions; cpu:portable: any machine of this architecture.",
)
@click.option("--spec", metavar="FILE", help="A TOML spec to use instead of the model's own.")
@json_option
def compile_command(
    source: str, output: str, quant: str, kv: str, target: str, spec: str | None, as_json: bool
) -> None:
    """Compile SRC, a GGUF file or a Hugging Face folder with safetensors, into NAME.llmc."""
    need_compiler("compile")
    from llmc.compiler.driver import compile_model

    with progress_bars() as progress:
        result = compile_model(source, output, quant=quant, kv=kv, target=target, spec=spec, progress=progress)
    if as_json:
        print_json(
            {
                "path": str(result.path),
                "seconds": result.seconds,
                "bytes": result.bytes,
                "bits_per_weight": result.bits_per_weight,
                "format": result.format,
            }
        )
        return
    print_table(
        [
            ("artifact", str(result.path)),
            ("weights", f"{result.format}, {result.bits_per_weight:.2f} bits per weight"),
            ("size", words_for_bytes(result.bytes)),
            ("time", f"{result.seconds:.1f} s"),
        ]
    )
