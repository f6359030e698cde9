"""The command `llmc`: its list of subcommands, its exit codes, and how every error is shown.

Exit codes: 0 done, 1 refused with a reason, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM. An error is one
line on standard error. `LLMC_DEBUG=1` shows the traceback behind it. SIGTERM ends it with 143, tidied up.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click

from llmc import __version__

# Subcommand -> where it is. Only the one that is called is imported.
COMMANDS = {
    "compile": "llmc.cli_compile.compile_command",
    "run": "llmc.cli_run.run",
    "chat": "llmc.cli_chat.chat",
    "serve": "llmc.cli_serve.serve",
    "translate": "llmc.cli_translate.translate",
    "embed": "llmc.cli_embed.embed",
    "fill": "llmc.cli_embed.fill",
    "bench": "llmc.cli_bench.bench",
    "eval": "llmc.cli_eval.eval_command",
    "inspect": "llmc.cli_inspect.inspect_command",
    "verify": "llmc.cli_inspect.verify",
    "spec": "llmc.cli_spec.spec",
    "tune": "llmc.cli_tune.tune",
    "plan": "llmc.cli_plan.plan",
    "doctor": "llmc.cli_doctor.doctor",
}

# Commands that multiply large matrices with NumPy. For any other its BLAS library starts threads to no end, which spin.
_WITH_BLAS = ("compile", "eval", "tune")

# Where a refusal's class lives. Looked up among the modules already imported: an exception whose
# module nobody imported cannot have been raised, and importing it here would slow every start.
_REFUSALS = (("llmc.compiler.errors", "LlmcError"), ("llmc.runtime.errors", "LlmcError"))


def _is_refusal(error: BaseException) -> bool:
    modules = [(sys.modules.get(module), name) for module, name in _REFUSALS]
    return isinstance(error, tuple(getattr(m, name) for m, name in modules if m is not None))


def one_line(text: str) -> str:
    r"""Return `text` on one line, with what a terminal would obey written out.

    >>> one_line("no such file:\n  a\x1b[2Jb")
    'no such file: a\\x1b[2Jb'
    """
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def explain(error: Exception) -> str:
    """Return the one line that a user reads about `error`."""
    if _is_refusal(error):
        return one_line(str(error))
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return one_line(f"{os.fsdecode(error.filename)}: no such file or folder")
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return one_line(f"{where}{error.strerror.lower()}")
    if isinstance(error, MemoryError):
        return one_line(f"out of memory {error}")
    if isinstance(error, ModuleNotFoundError):
        return one_line(f"{error}; `llmc doctor` lists what is installed")
    detail = one_line(str(error))
    return f"internal error: {type(error).__name__}: {detail} (LLMC_DEBUG=1 shows where)"


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The signals that asked to stop so far. They raise, so that what is half-written is removed on the way out."""
    seen: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    mine = [number for number, handler in usual.items() if signal.getsignal(number) == handler]
    try:
        for number in mine:
            with contextlib.suppress(ValueError):  # not the main thread: the signals are not ours to take
                signal.signal(number, stop)
        yield seen
    finally:
        for number in mine:
            with contextlib.suppress(ValueError):
                signal.signal(number, usual[number])


class Front(click.Group):
    """A group that turns every way to fail into one line on standard error and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Parse, run, and leave the process with the exit code."""
        extra["standalone_mode"] = False
        with _stop_signals() as stopped:
            try:
                code = super().main(*args, **extra)
            except click.UsageError as error:
                self._complain(_usage(error), 2)
                code = 2
            except click.ClickException as error:
                self._complain(one_line(error.format_message()))
                code = error.exit_code
            except click.Abort:
                code = 130
            except Exception as error:  # the last door before the user: nothing may pass as a traceback
                code = self._failed(error, stopped)
        sys.exit(code if isinstance(code, int) else 0)

    def _failed(self, error: Exception, stopped: list[int]) -> int:
        if os.environ.get("LLMC_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        if stopped and isinstance(error, RuntimeError):  # what native code makes of a signal that came while it ran
            return 128 + stopped[-1]
        self._complain(explain(error))
        return 1

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command by its name; None for another name, and then all are imported, to say which may be meant."""
        if cmd_name not in COMMANDS:
            self.commands = {name: command for name in COMMANDS if (command := self.get_command(ctx, name))}
            return None
        if cmd_name not in _WITH_BLAS:
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        module, _, name = COMMANDS[cmd_name].rpartition(".")
        found: click.Command = getattr(importlib.import_module(module), name)
        return found

    def _complain(self, line: str, code: int = 1) -> None:
        """To the user; a worker of a launcher leaves it to that, which says the first of what all have to say."""
        member = sys.modules.get("llmc.runtime.workers.member")
        if member is None or not member.complain(line, code):
            click.echo(f"llmc: {line}", err=True)


def _usage(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx is not None else "llmc"
    message = one_line(error.format_message())
    stop = "" if message.endswith((".", "?")) else "."
    return f"{message}{stop} Try '{path} --help'."


@click.group(
    cls=Front,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  llmc compile model.gguf -o model.llmc --quant q4
  llmc run model.llmc "Give me three tips for staying healthy."
  llmc chat model.llmc
  llmc bench model.llmc --threads 1,2 --batch 1,8

\b
Exit codes: 0 done, 1 refused with a reason, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.""",
)
@click.version_option(__version__, prog_name="llmc", message="%(prog)s %(version)s")
@click.pass_context
def command(context: click.Context) -> None:
    """Compile a language model ahead of time into a folder, and run that folder."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
