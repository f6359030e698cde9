"""Options that more than one command takes, and the checks click does not make."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads (default, and at most: every core allowed)."
)

drafts_option = click.option(
    "--drafts",
    type=click.IntRange(0, 15),
    metavar="N",
    help="Tokens guessed ahead at most, and checked at once (default: 7, on a GPU 0). It changes speed alone.",
)

draft_model_option = click.option(
    "--draft-model",
    metavar="SMALL.llmc",
    help="A smaller model with the same tokenizer, which guesses tokens. It changes speed alone.",
)

copy_weights_option = click.option(
    "--copy-weights/--no-copy-weights",
    default=None,
    help="Have weights in memory of its own, in large pages, in place of the file's, which are often slower. "
    "Default: copied little by little, where that is seen to be faster and memory has room for them twice.",
)

devices_option = click.option(
    "--devices", is_flag=True, help="Start a worker for each device the artifact was compiled for (mpirun)."
)


def for_devices(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --devices, which runs it in a process for each device of its `artifact`.

    It is rank 0 that runs the command itself. The others do what rank 0 has them do, and print nothing.
    """

    @devices_option
    @functools.wraps(command)
    def workers(*, artifact: str, threads: int | None, devices: bool, **options: Any) -> None:
        from llmc.runtime.workers.world import launched

        if launched():
            from llmc.runtime.workers.attend import attend

            if attend(artifact, threads, options.get("copy_weights")):
                return
        elif devices:
            start_workers(artifact, "llmc", sys.argv[1:])
        command(artifact=artifact, threads=threads, **options)

    return workers


def start_workers(artifact: str, module: str, arguments: list[str]) -> NoReturn:
    """Run `python -m module` in a process for each device of the artifact, and leave with what they end with."""
    from llmc.cli_run import for_terminal
    from llmc.runtime.workers.launch import launch

    code, line = launch(artifact, module, arguments, for_terminal if sys.stdout.isatty() else None)
    if line is not None:
        click.echo(f"llmc: {line}", err=True)
    sys.exit(code)


def read_text(path: str) -> str:
    """Return what stands in a UTF-8 file. Its line ends stay as they are: they are tokens too."""
    raw = Path(path).read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path}: not valid UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from None


def positive_list(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return `1,2,8` as a tuple of positive integers, or name the piece that is none."""
    if value is None:
        return None
    pieces = [piece.strip() for piece in value.split(",")]
    for piece in pieces:
        if not (piece.isascii() and piece.isdigit() and int(piece) > 0):
            raise click.BadParameter(f"{piece!r} is not a positive whole number.", context, parameter)
    return tuple(int(piece) for piece in pieces)
