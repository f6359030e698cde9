"""The options of `run`, `chat` and `translate` that say how an answer is decoded, in groups, with one table for all.

Names and ranges are those of llmc.runtime.decoding.options.Options; docs/decoding.md explains them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import click

from llmc.options import read_text
from llmc.runtime.decoding.options import RANGES, Options
from llmc.runtime.decoding.ranges import Number
from llmc.runtime.decoding.strategies import STRATEGIES
from llmc.runtime.errors import RequestError

_F = TypeVar("_F", bound=Callable[..., Any])
_NAMES = [name for name in STRATEGIES if "." not in name]  # the others are older spellings


class _Flag(NamedTuple):
    """An option of the command line, of the same name as the field of Options that it sets."""

    name: str
    help: str
    metavar: str = "N"
    many: bool = False


_LENGTH = (
    _Flag("max_tokens", "Stop after this many new tokens (256)."),
    _Flag("min_tokens", "No end before this many tokens."),
    _Flag("stop", "End before this text; may be given again.", "TEXT", many=True),
    _Flag("ignore_eos", "Go on when the model says it is done."),
)
_CHOICE = (
    _Flag("strategy", f"Several of the options below at once: {', '.join(_NAMES)}.", "NAME"),
    _Flag("temperature", "Sharper below 1, flatter above; 0 takes the likeliest token each time (the default).", "T"),
    _Flag("top_k", "Sample from the K likeliest tokens only.", "K"),
    _Flag("top_p", "... from the likeliest tokens whose probabilities reach P.", "P"),
    _Flag("min_p", "... from tokens at least P times as likely as the likeliest.", "P"),
    _Flag("typical_p", "... from the tokens whose surprise is nearest to the expected one, that reach P.", "P"),
    _Flag("tail_free", "... from the tokens before the flat end of the probabilities.", "Z"),
    _Flag("max_k", "... and at last from at most K of those left.", "K"),
    _Flag("mirostat_tau", "Of mirostat: bits of surprise a token is to have (5).", "BITS"),
    _Flag("mirostat_eta", "Of mirostat: how fast it adapts (0.1).", "X"),
    _Flag("fsd_k", "Of fsd: how many of the likeliest tokens compete (6).", "K"),
    _Flag("fsd_alpha", "Of fsd: how much repetition counts (0.5).", "X"),
    _Flag("fsd_n", "Of fsd: the longest n-grams counted (3)."),
    _Flag("fsd_beta", "Of fsd: the share of the longest n-grams (0.9).", "X"),
    _Flag("fsd_random_tokens", "Of random_fsd: first tokens that chance may choose (10)."),
    _Flag("fsd_random_share", "Of random_fsd: how many of them it does (0.5).", "X"),
    _Flag("seed", "Same seed, same text, whatever else runs."),
)
_PENALTIES = (
    _Flag("repetition_penalty", "Above 1: against tokens of prompt and answer (1).", "X"),
    _Flag("presence_penalty", "Taken from the logit of each token that was said (0).", "X"),
    _Flag("frequency_penalty", "... for each time that it was said (0).", "X"),
    _Flag("logit_bias", "Added to the logit of token ID; may be given again.", "ID=X", many=True),
    _Flag("banned", "A token that is never chosen; may be given again.", "ID", many=True),
)
_ANSWERS = (
    _Flag("n", "Answers to give; sampled with seeds that follow --seed, or the best of --beams."),
    _Flag("beams", "Search for the likeliest answer with this many beams (1)."),
    _Flag("length_penalty", "Of beams: above 0 favours long answers (1).", "X"),
    _Flag("early_stopping", "Of beams: end with as many answers as beams (default: no).", "[no|yes|never]"),
    _Flag("logprobs", "With --json: log-probabilities of each token and of the N likeliest."),
)
_FORM = (
    _Flag("json_schema", "A JSON value of the schema in FILE; {} or true in it for any.", "FILE"),
    _Flag("regex", "Text that a regular expression matches whole.", "RE"),
    _Flag("lark", "Text of the grammar in FILE (docs/decoding.md).", "FILE"),
)
_SPEED = (_Flag("prediction", "What much of the answer may be like, in FILE: guessed by, no more.", "FILE"),)
_ENDLESS = (
    _Flag("endless", "Go on when the cache is full (docs/endless.md).", "[sinks|shift|reevaluate]"),
    _Flag("n_keep", "First tokens that stay (4)."),
    _Flag("n_discard", "Tokens forgotten at once (16; half of the window for reevaluate)."),
    _Flag("window", "Tokens seen at most (default: what context and cache allow)."),
)
GROUPS: dict[str, tuple[_Flag, ...]] = {
    "Length": _LENGTH,
    "Choice of tokens": _CHOICE,
    "Penalties": _PENALTIES,
    "Answers": _ANSWERS,
    "Form of the answer": _FORM,
    "Speed": _SPEED,
    "Text without end": _ENDLESS,
}


class _Value(click.ParamType[Any]):
    """A value that the field of Options of this name may have."""

    name = "value"

    def __init__(self, field: str) -> None:
        self._field = field

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """The number or word; click tells its user what is wrong with it."""
        range_ = RANGES[self._field]
        if isinstance(range_, Number):
            kind = int if range_.whole else float
            try:
                value = kind(value)
            except (ValueError, OverflowError):
                self.fail(f"{value!r} is not a {'whole ' if range_.whole else ''}number.", parameter, context)
        fault = range_.fault(self._field, value)
        if fault:
            self.fail(fault.partition(": ")[2], parameter, context)
        return value


class _Bias(click.ParamType[Any]):
    """ID=X."""

    name = "bias"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """The token id and the number."""
        id_, _, bias = str(value).partition("=")
        try:
            return int(id_), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=NUMBER, as in 42=-1.5.", parameter, context)


class _FileText(click.ParamType[Any]):
    """The text of a file."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """What stands in the file."""
        return read_text(value)


class _GroupedOption(click.Option):
    """An option that knows the heading it stands under."""

    def __init__(self, *arguments: Any, group: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help shows decoding options under headings of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the ordinary options, then a section for each group."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not isinstance(parameter, click.Argument):
                sections.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def decoding_options(*without: str) -> Callable[[_F], _F]:
    """Add the options of all groups, less the fields and groups named; they come as keywords, None where not given."""

    def add(function: _F) -> _F:
        options = [
            _option(flag, group)
            for group, flags in GROUPS.items()
            for flag in flags
            if group not in without and flag.name not in without
        ]
        for option in reversed(options):
            function = option(function)
        return function

    return add


def given(values: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Those of the options that were given, as fields of Options; wrong usage if they contradict each other."""
    fields = {name: value for name, value in values.items() if value is not None and value != ()}
    if "logprobs" in fields and not as_json:
        raise click.UsageError("--logprobs needs --json: log-probabilities are no text.")
    try:
        Options.of(fields)
    except RequestError as error:
        raise click.UsageError(str(error)) from None
    return fields


def _option(flag: _Flag, group: str) -> Callable[[_F], _F]:
    name = f"-{flag.name}" if len(flag.name) == 1 else f"--{flag.name.replace('_', '-')}"
    settings: dict[str, Any] = {"help": flag.help, "default": None, "cls": _GroupedOption, "group": group}
    if flag.name == "ignore_eos":
        return click.option(name, flag.name, is_flag=True, **settings)
    kinds: dict[str, Any] = {
        "stop": click.STRING, "logit_bias": _Bias(), "banned": click.INT, "regex": click.STRING,
        "json_schema": _FileText(), "lark": _FileText(), "prediction": _FileText(),
    }  # fmt: skip
    kind = kinds.get(flag.name) or _Value(flag.name)
    return click.option(name, flag.name, type=kind, metavar=flag.metavar, multiple=flag.many, **settings)
