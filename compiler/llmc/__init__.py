"""Compile a language model ahead of time, and run what comes out.

>>> import llmc
>>> llmc.__version__
'0.1.0'

`llmc.compile` needs the extra `llmc[compile]`; `llmc.load`, `llmc.load_graph`, `llmc.inspect` and `llmc.verify`
need nothing but the runtime. Each is imported when first used: `import llmc` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.compiler.driver import compile_model as compile
    from llmc.runtime import inspect, load, load_graph, verify

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "inspect", "load", "load_graph", "verify"]

# public name -> (module that holds it, its name there)
_LAZY = {
    "compile": ("llmc.compiler.driver", "compile_model"),
    "load": ("llmc.runtime", "load"),
    "load_graph": ("llmc.runtime", "load_graph"),
    "inspect": ("llmc.runtime", "inspect"),
    "verify": ("llmc.runtime", "verify"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'llmc' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
