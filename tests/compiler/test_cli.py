"""The command line: its errors, exit codes and JSON, with a model that only repeats its prompt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmc.runtime
from llmc.cli import COMMANDS, command, explain, one_line
from llmc.runtime.errors import LlmcError as RuntimeRefusal


class _Stream:
    """Yields pieces, then has a result; stands in for what the runtime returns."""

    def __init__(self, model: _Model, pieces: list[str], reason: str) -> None:
        self._model, self._pieces = model, pieces
        timings = {"prefill_s": 0.1, "decode_s": 0.1, "prefill_tokens": 2, "decode_tokens": 2}
        self.result = _Record(
            text="".join(pieces),
            ids=[5, 6],
            prompt_ids=[1, 2],
            finish_reason=reason,
            timings=timings,
            logprobs=None,
            others=[],
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._pieces

    def close(self) -> None:
        self._model.stopped = True


class _Record:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class _Model:
    """Answers `<n messages: last message>`, or continues a text with `!`."""

    def __init__(self, template: bool = True, reason: str = "stop") -> None:
        self.manifest = {"chat_template": "chat_template.jinja" if template else None}
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []
        self.reason = reason
        self.stopped = False

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def stream(self, prompt: str, **options: Any) -> _Stream:
        self.calls.append(("stream", prompt, options))
        return _Stream(self, [prompt, "!"], self.reason)

    def chat_stream(self, messages: list[dict[str, str]], **options: Any) -> _Stream:
        self.calls.append(("chat", [dict(m) for m in messages], options))
        return _Stream(self, [f"<{len(messages)}: ", messages[-1]["content"], ">"], self.reason)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> _Model:
    """A fake in place of whatever `llmc.runtime.load` would open."""
    fake = _Model()
    monkeypatch.setattr(llmc.runtime, "load", lambda path, **_: fake)
    return fake


def llmc_run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), input=stdin)


def refused(result: Result, code: int = 1) -> str:
    """Return the only line on standard error, after checking that it is the only line."""
    assert result.exit_code == code, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("llmc: ")
    return line


# --- run ---


def test_run_asks_as_a_user_when_there_is_a_chat_template(model: _Model) -> None:
    result = llmc_run("run", "m.llmc", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "<1: hi>\n", "")
    assert model.calls[0][1] == [{"role": "user", "content": "hi"}]


def test_run_raw_continues_the_text(model: _Model) -> None:
    assert llmc_run("run", "m.llmc", "hi", "--raw").stdout == "hi!\n"


def test_run_without_a_template_continues_the_text(model: _Model) -> None:
    model.manifest["chat_template"] = None
    assert llmc_run("run", "m.llmc", "hi").stdout == "hi!\n"


def test_run_reads_the_prompt_from_standard_input(model: _Model) -> None:
    assert llmc_run("run", "m.llmc", "-", "--raw", stdin="süß\n").stdout == "süß\n!\n"
    assert llmc_run("run", "m.llmc", "--raw", stdin="piped").stdout == "piped!\n"


def test_run_json_holds_the_answer_and_nothing_else(model: _Model) -> None:
    result = llmc_run("run", "m.llmc", "hé", "--json")
    answer = json.loads(result.stdout)
    assert list(answer) == ["text", "ids", "prompt_ids", "finish_reason", "timings"]
    assert answer["text"] == "<1: hé>"
    assert result.stdout.isascii()


def test_run_passes_the_sampling_options_on(model: _Model) -> None:
    flags = "--max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.9 --seed 7 --ignore-eos"
    llmc_run("run", "m.llmc", "hi", *flags.split())
    assert model.calls[0][2] == {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "seed": 7,
        "ignore_eos": True,
    }


def test_a_prompt_that_is_not_utf8_is_refused_with_its_place(model: _Model) -> None:
    line = refused(llmc_run("run", "m.llmc", "-", stdin=b"ab\xff"))
    assert "byte 2 is 0xff" in line


# --- chat ---


def test_chat_over_a_pipe_remembers_and_resets(model: _Model) -> None:
    result = llmc_run("chat", "m.llmc", stdin="a\n\nb\n/reset\nc\n/exit\nd\n")
    assert (result.exit_code, result.stdout) == (0, "<1: a>\n<3: b>\n<1: c>\n")


def test_chat_keeps_the_system_message_through_a_reset(model: _Model) -> None:
    llmc_run("chat", "m.llmc", "--system", "be brief", stdin="a\n/reset\nb\n")
    assert [m["role"] for m in model.calls[1][1]] == ["system", "user"]


def test_chat_json_is_one_object_a_line(model: _Model) -> None:
    result = llmc_run("chat", "m.llmc", "--json", stdin="a\nb\n")
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["<1: a>", "<3: b>"]


def test_chat_says_when_the_context_is_full(model: _Model) -> None:
    model.reason = "context"
    assert "/reset" in llmc_run("chat", "m.llmc", stdin="a\n").stderr


def test_chat_needs_a_template(model: _Model) -> None:
    model.manifest["chat_template"] = None
    assert "llmc run m.llmc" in refused(llmc_run("chat", "m.llmc", stdin="a\n"))


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run", "m", "x", "--temprature", "1"], "'--temperature'?"),
        (["run", "m", "x", "--temperature", "nan"], "wanted a number in 0..10000"),
        (["run", "m", "x", "--temperature", "-1"], "--temperature"),
        (["run", "m", "x", "--top-p", "0"], "--top-p"),
        (["run", "m", "x", "--max-tokens", "9223372036854775808"], "--max-tokens"),
        (["run", "m", "x", "--seed", "-1"], "--seed"),
        (["run", "m", "x", "--threads", "0"], "--threads"),
        (["run"], "Missing argument"),
        (["compile", "m"], "Missing option '-o'"),
        (["compile", "m", "-o", "x", "--quant", "q9"], "'q8'"),
        (["compile", "m", "-o", "x", "--target", "gpu:sm_90"], "cpu:portable"),
        (["compile", "m", "-o", "x", "--target", "cuda"], "cuda:sm_NN"),
        (["bench", "m", "--batch", "1,0"], "'0' is not a positive"),
        (["bench", "m", "--threads", "1,,2"], "'' is not a positive"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], hint: str) -> None:
    line = refused(llmc_run(*arguments), code=2)
    assert hint in line
    assert "--help" in line


def test_a_refusal_of_the_runtime_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, **_: object) -> None:
        raise RuntimeRefusal(f"{path}: flipped byte in lib/x.so")

    monkeypatch.setattr(llmc.runtime, "load", load)
    line = refused(llmc_run("run", "m.llmc", "hi"))
    assert line == "llmc: m.llmc: flipped byte in lib/x.so"


@pytest.mark.parametrize("debug", ["", "0", "1"])
def test_our_own_mistake_shows_a_traceback_only_in_debug_mode(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    def load(path: str, **_: object) -> None:
        raise ZeroDivisionError("oh\nno")

    monkeypatch.setattr(llmc.runtime, "load", load)
    monkeypatch.setenv("LLMC_DEBUG", debug)
    result = llmc_run("run", "m.llmc", "hi")
    assert result.exit_code == 1
    assert ("Traceback" in result.stderr) == (debug == "1")
    last = result.stderr.splitlines()[-1]
    assert last == "llmc: internal error: ZeroDivisionError: oh no (LLMC_DEBUG=1 shows where)"


def test_ctrl_c_is_exit_code_130_and_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llmc.runtime, "load", load)
    result = llmc_run("run", "m.llmc", "hi")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.gguf"), "a.gguf: no such file"),
        (PermissionError(13, "Permission denied", "/x"), "/x: permission denied"),
        (OSError(28, "No space left on device"), "no space left on device"),
        (ModuleNotFoundError("No module named 'tvm'"), "llmc doctor"),
    ],
)
def test_the_system_s_refusals_are_put_in_words(error: Exception, words: str) -> None:
    assert words in explain(error)
    assert "internal" not in explain(error)


def test_a_message_cannot_steer_the_terminal() -> None:
    assert one_line("a\x1b]0;b\x07\nc\u202e") == "a\\x1b]0;b\\x07 c\\u202e"


@pytest.mark.parametrize("name", ["compile", "spec"])
def test_without_the_compiler_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("llmc.console.find_spec", lambda module: None)
    extra = ["-o", "x.llmc"] if name == "compile" else []
    line = refused(llmc_run(name, "m.gguf", *extra))
    assert "pip install 'llmc[compile]'" in line


# --- the rest ---


@pytest.mark.parametrize("name", [None, *sorted(COMMANDS)])
def test_help_has_examples(name: str | None) -> None:
    result = llmc_run(*([name] if name else []), "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_speaks_json(name: str) -> None:
    assert "--json" in llmc_run(name, "--help").stdout


def test_doctor_tells_what_is_here() -> None:
    facts = json.loads(llmc_run("doctor", "--json").stdout)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["extras"][""]["installed"] is True
    assert facts["memory"]["total"] > 1e9
    assert "python" in llmc_run("doctor").stdout


def test_bare_command_shows_its_help() -> None:
    assert "Commands:" in llmc_run().stdout


def _process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmc", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_as_a_process_it_refuses_without_a_traceback(tmp_path: Any) -> None:
    done = _process("run", str(tmp_path / "none.llmc"), "hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "none.llmc" in done.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = f"{sys.executable} -m llmc doctor --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_help_starts_fast_and_loads_no_compiler() -> None:
    code = (
        "import sys\nfrom llmc.cli import command\n"
        "heavy = {'tvm', 'tvm_ffi', 'torch', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("closed", "code", "says"),
    [("<&-", 0, ""), ("2>&-", 0, ""), (">&-", 1, "llmc: standard output is closed"), ("<&- >&- 2>&-", 1, "")],
)
def test_streams_that_the_caller_closed(closed: str, code: int, says: str) -> None:
    line = f"{sys.executable} -m llmc doctor {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.startswith(says)
    assert len(done.stderr.splitlines()) == (1 if says else 0)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("native", [False, True])
def test_a_signal_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, name: str, native: bool) -> None:
    """Native code that calls back into Python turns what a signal raises there into an error of its own."""
    tidied: list[str] = []

    def load(path: str, **_: Any) -> Any:
        try:
            signal.raise_signal(getattr(signal, name))
        except BaseException:
            if native:
                raise RuntimeError("") from None
            raise
        finally:
            tidied.append(path)

    monkeypatch.setattr(llmc.runtime, "load", load)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = llmc_run("run", "m.llmc", "hi")
    assert (result.exit_code, result.output.strip()) == (128 + getattr(signal, name), "")
    assert tidied == ["m.llmc"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_compile_offers_what_the_compiler_knows() -> None:
    from llmc.cli_compile import KV_KINDS, QUANTS
    from llmc.compiler.driver.request import KV_DTYPES
    from llmc.compiler.formats import OFFERED

    assert sorted(QUANTS) == sorted(["auto", *OFFERED])
    assert sorted(KV_KINDS) == sorted(KV_DTYPES)


@pytest.mark.parametrize(("text", "size"), [("80MB", 80_000_000), ("1.5 GiB", 1_610_612_736), ("12345", 12345)])
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    from llmc.cli_compile import _size

    assert _size(None, None, text) == size  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["lots", "-3MB", "3 parsecs", "1e9", "9" * 40])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    result = CliRunner().invoke(command, ["compile", "x.gguf", "-o", "y.llmc", "--size", text])
    assert result.exit_code == 2
    assert "is no size" in result.stderr
