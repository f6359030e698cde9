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
        "import importlib.metadata as m; assert m.version('apache-tvm-ffi') == ffi.__version__.split('+')[0]",
        "assert ffi.libinfo.im.version('numpy')",  # as it would ask later
        "import tvm; assert tvm.runtime.tensor([1.0]).numpy()[0] == 1",  # which finds its libraries that way
        "assert import_ffi() is ffi",
    ],
)
def test_what_tvm_ffi_imports_for_others_comes_later(said: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT + said], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
