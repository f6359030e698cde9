"""The thin runtime: loads an artifact and generates text. It imports no compiler and none of its siblings.

>>> import llmc.runtime
>>> [name for name in sorted(llmc.runtime.__all__) if name.islower()]
['inspect', 'load', 'load_graph', 'verify']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.runtime.decoding.options import Options
    from llmc.runtime.engine.engine import Engine
    from llmc.runtime.engine.results import StepResult
    from llmc.runtime.errors import ArtifactError, LlmcError, RequestError
    from llmc.runtime.generate import Generation
    from llmc.runtime.graph import load_graph
    from llmc.runtime.load_model import load
    from llmc.runtime.loading.artifact import inspect, verify
    from llmc.runtime.model import Model
    from llmc.runtime.quality import Evaluation

__all__ = [
    "ArtifactError",
    "Engine",
    "Evaluation",
    "Generation",
    "LlmcError",
    "Model",
    "Options",
    "RequestError",
    "StepResult",
    "inspect",
    "load",
    "load_graph",
    "verify",
]

_HOMES = {
    "ArtifactError": "llmc.runtime.errors",
    "Engine": "llmc.runtime.engine.engine",
    "Evaluation": "llmc.runtime.quality",
    "Generation": "llmc.runtime.generate",
    "LlmcError": "llmc.runtime.errors",
    "Model": "llmc.runtime.model",
    "Options": "llmc.runtime.decoding.options",
    "RequestError": "llmc.runtime.errors",
    "StepResult": "llmc.runtime.engine.results",
    "inspect": "llmc.runtime.loading.artifact",
    "load": "llmc.runtime.load_model",
    "load_graph": "llmc.runtime.graph",
    "verify": "llmc.runtime.loading.artifact",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import llmc.runtime` itself costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
