"""Who may import whom, how long a file and a function may be, what a file may be called."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "frontends", "passes", "targets", "runtime")
EVERYTHING = frozenset({*FOLDERS, "driver", "facade", "serving"})

# part -> the parts of llmc it may import. "facade" is compiler/llmc/, "driver" compiler/driver/, "serving"
# runtime/serving/.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "compiler": frozenset(),
    "frontends": frozenset({"compiler"}),
    "passes": frozenset({"compiler"}),
    "targets": frozenset({"compiler", "passes"}),
    "runtime": frozenset(),
    "serving": frozenset({"runtime"}),
    "driver": EVERYTHING - {"facade", "driver", "serving"},
    "facade": EVERYTHING,
}

# part -> what it may import from outside, besides the standard library.
_COMPILE_SIDE = frozenset({"tvm", "tvm_ffi", "numpy"})
OUTSIDE: dict[str, frozenset[str]] = {
    "compiler": _COMPILE_SIDE | {"tomli", "safetensors"},
    # torch only for programs of torch.export, from archives that frontends/importers/exported.py has checked.
    "frontends": _COMPILE_SIDE | {"gguf", "google", "huggingface_hub", "onnx", "safetensors", "tokenizers", "torch"},
    "passes": _COMPILE_SIDE,
    "targets": _COMPILE_SIDE,
    # The runtime installs alone: this is its whole list of dependencies, mpi4py only where there are several devices
    # (and llguidance, by its name in a text, where an answer is to have a form).
    "runtime": frozenset({"tvm_ffi", "numpy", "tokenizers", "safetensors", "jinja2", "mpi4py"}),
    "serving": frozenset({"numpy", "prometheus_client", "starlette", "uvicorn"}),
    "driver": _COMPILE_SIDE | {"tomli", "threadpoolctl"},
    "facade": frozenset({"click", "rich", "numpy"}),
}

# room of targets/ -> the other rooms it may import. What stands in no room may import all: it puts kernels together.
ROOMS: dict[str, frozenset[str]] = {
    "rows": frozenset(),
    "matrices": frozenset({"rows"}),
    "attention": frozenset({"rows", "matrices"}),
    "cuda": frozenset(),
}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "misc"}

FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"), key=str)


def part_of(path: Path) -> str:
    """Return the row of the table that `path` belongs to."""
    relative = path.relative_to(ROOT)
    if relative.parts[:2] == ("compiler", "llmc"):
        return "facade"
    own = {("compiler", "driver"): "driver", ("runtime", "serving"): "serving"}
    return own.get(relative.parts[:2], relative.parts[0])


def part_named(module: str) -> str:
    """Return the part that holds `llmc...`; what is in no folder is the facade."""
    pieces = module.split(".")
    if pieces[:3] == ["llmc", "compiler", "driver"]:
        return "driver"
    if pieces[:3] == ["llmc", "runtime", "serving"]:
        return "serving"
    return pieces[1] if len(pieces) > 1 and pieces[1] in FOLDERS else "facade"


def room_of(pieces: Sequence[str]) -> str | None:
    """Return the room of ("targets", ROOM, ...); None for what stands in none."""
    return pieces[1] if len(pieces) > 2 and pieces[0] == "targets" and pieces[1] in ROOMS else None


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted module) for every import, in functions and type-checking blocks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: only absolute imports"
            module = str(node.module)
            for alias in node.names:
                # `from llmc.compiler import driver` imports llmc.compiler.driver.
                yield node.lineno, f"{module}.{alias.name}"


def faults(path: Path, source: str) -> list[str]:
    """Return one line for each import in `source` that the tables do not allow."""
    part, room, found = part_of(path), room_of(path.relative_to(ROOT).parts), list[str]()
    for line, module in imports(ast.parse(source)):
        top = module.split(".")[0]
        if top == "llmc":
            other = part_named(module)
            if other != part and other not in MAY_IMPORT[part]:
                allowed = sorted(MAY_IMPORT[part])
                found.append(f"{path.name}:{line}: {part} may import {allowed}, not {other}")
            other_room = room_of(module.split(".")[1:])
            if room is not None and other_room not in (None, room, *ROOMS[room]):
                allowed = sorted(ROOMS[room])
                found.append(f"{path.name}:{line}: targets/{room} may import {allowed}, not {other_room}")
        elif top not in sys.stdlib_module_names and top not in OUTSIDE[part] | {"__future__"}:
            allowed = sorted(OUTSIDE[part])
            found.append(f"{path.name}:{line}: {part} may import {allowed}, not {top}")
    return found


def test_one_file_imports_torch() -> None:
    found = [path for path in FILES if any(m.split(".")[0] == "torch" for _, m in imports(ast.parse(path.read_text())))]
    assert [str(path.relative_to(ROOT)) for path in found] == ["frontends/importers/exported.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    assert faults(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("where", "source", "reason"),
    [
        ("passes/x.py", "from llmc.targets.cpu import y", "not targets"),
        ("runtime/x.py", "from llmc.compiler.errors import LlmcError", "not compiler"),
        ("runtime/x.py", "def f():\n    import tvm", "not tvm"),
        ("targets/x.py", "from llmc.compiler import driver", "not driver"),
        ("targets/rows/x.py", "from llmc.targets.matrices import linear", "not matrices"),
        ("targets/matrices/x.py", "from llmc.targets.attention.heads import y", "not attention"),
        ("compiler/x.py", "import llmc", "not facade"),
        ("compiler/driver/x.py", "import llmc.cli", "not facade"),
        ("frontends/x.py", "import transformers", "not transformers"),
        ("passes/x.py", "import torch", "not torch"),
    ],
)
def test_a_seeded_fault_is_caught(where: str, source: str, reason: str) -> None:
    (fault,) = faults(ROOT / where, source)
    assert reason in fault


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES, "split the file: one concept, one file"
    long = {
        node.name: length
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}, "split these functions"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_named_after_what_it_holds(path: Path) -> None:
    assert path.stem not in BANNED_NAMES
    assert not path.stem.startswith("new_")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), "the first line is a docstring"


def test_what_tests_import_has_a_name_of_its_own() -> None:
    """Their folders are put on one path, so that of two files of one name only the first would be found."""
    names = [path.name for path in TESTS if not path.name.startswith("test_") and path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
