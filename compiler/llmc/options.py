"""Options that more than one command takes, and the checks click does not make."""

from __future__ import annotations

import click

threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads (default, and at most: every core allowed)."
)


def positive_list(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return `1,2,8` as a tuple of positive integers, or name the piece that is none."""
    if value is None:
        return None
    pieces = [piece.strip() for piece in value.split(",")]
    for piece in pieces:
        if not (piece.isascii() and piece.isdigit() and int(piece) > 0):
            raise click.BadParameter(f"{piece!r} is not a positive whole number.", context, parameter)
    return tuple(int(piece) for piece in pieces)
