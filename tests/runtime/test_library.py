"""What loading a library imports, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT = "import sys; from llmc.runtime.loading.library import import_ffi; ffi = import_ffi(); "


@pytest.mark.parametrize(
    "said",
    [
        "assert 'torch' not in sys.modules and 'importlib.metadata' not in sys.modules",
        "assert 'logging' not in sys.modules and 'subprocess' not in sys.modules",  # to look for torch
        "assert 'tvm_ffi.cpp.extension' not in sys.modules; assert callable(ffi.cpp.load_inline)",
        "import importlib.metadata as m; assert m.version('apache-tvm-ffi') == ffi.__version__.split('+')[0]",
        "assert ffi.libinfo.im.version('numpy')",  # as it would ask later
        "import tvm; assert tvm.runtime.tensor([1.0]).numpy()[0] == 1",  # which finds its libraries that way
        "assert import_ffi() is ffi",
    ],
)
def test_what_tvm_ffi_imports_for_others_comes_later(said: str) -> None:
    check(IMPORT + said)


def test_another_thread_always_finds_the_real_module() -> None:
    other = "import threading; end = threading.Event(); threading.Thread(target=end.wait, daemon=True).start(); "
    check(
        other + IMPORT + "assert 'torch' not in sys.modules; import importlib.metadata as m; assert ffi.libinfo.im is m"
    )


def test_the_compiler_does_without_torch() -> None:
    check(
        "import sys; from llmc.runtime.loading.library import without_torch\n"
        "with without_torch():\n"
        "    from llmc.compiler.driver import compile_model\n"
        "assert 'torch' not in sys.modules\n"
        "import torch; assert torch.ones(1).item() == 1"
    )


def check(program: str) -> None:
    """It ends without an error."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
