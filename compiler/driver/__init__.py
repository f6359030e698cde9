"""Model files in, an artifact out: the one part that knows every other part.

compile.py is read top to bottom; recipe.py decides which format each matrix gets, budget.py and calibrate.py how
(by what they measure on probe.py's model), sources.py packs them, contents.py writes them while machine code is made,
check.py compares the result with the original, which original.py runs a layer at a time.
"""

from __future__ import annotations

from llmc.compiler.driver.compile import CompileResult, compile_model
from llmc.compiler.progress import Progress

__all__ = ["CompileResult", "Progress", "compile_model"]
