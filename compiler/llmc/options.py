"""Options that more than one command takes, and the checks click does not make."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])
_INT32_MAX = 2**31 - 1  # index tensors of the compiled step are int32


def _finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, parameter)
    return value


def sampling_options(function: _F) -> _F:
    """Add --max-tokens, --temperature, --top-k, --top-p and --seed."""
    options = (
        click.option(
            "--max-tokens",
            type=click.IntRange(1, _INT32_MAX),
            default=256,
            show_default=True,
            help="Stop after this many new tokens.",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(0, 100),
            callback=_finite,
            help="0 takes the likeliest token each time (the default).",
        ),
        click.option(
            "--top-k",
            type=click.IntRange(1, _INT32_MAX),
            help="Sample from the K likeliest tokens only.",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(0, 1, min_open=True),
            callback=_finite,
            help="Sample from the likeliest tokens whose probabilities reach P.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(0, 2**63 - 1),
            help="Same seed, same text, on the same machine and number of threads.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


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
