"""What to measure before weights are packed, and what follows from it: the recipe and the statistics."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.driver.recipe import Recipe, keep, read_recipe, uniform
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.sources import ModelSources
from llmc.compiler.errors import LlmcError
from llmc.compiler.spec import weight_count
from llmc.targets.target import AnyTarget, cpu_flags

if TYPE_CHECKING:
    from llmc.compiler.driver.check import Loss
    from llmc.compiler.driver.original import Original
    from llmc.compiler.driver.probe import Probe

Progress = Callable[[str, int, int], None]
CHECK_WINDOWS = 2  # of a calibration text


@dataclass(frozen=True)
class Plan:
    """How a model is to be quantized. `probe` and `windows` are there when something is measured.

    `lead`: of a model with an encoder, what its answers to the windows begin with.
    """

    recipe: Recipe
    source: ModelSources
    probe: Probe | Original | None
    windows: list[list[int]]
    lead: list[int] = field(default_factory=list)

    def measure(self, artifact: Path, chosen: Sequence[AnyTarget], report: Progress) -> Loss | None:
        """What the artifact loses; None when that was not asked for or cannot run here."""
        runs_here = any(t.arch == platform.machine() and cpu_flags().issuperset(t.requires) for t in chosen)
        if self.probe is None or not runs_here:
            return None
        from llmc.compiler.driver.check import measure

        report("check", 0, 1)
        loss = measure(self.probe, artifact, self.windows, self.lead)
        report("check", 1, 1)
        return loss


def make_plan(request: Request, model: Any, report: Progress) -> Plan:
    """Read the recipe or find it; run the unquantized model as far as the request needs it to."""
    if model.spec.encoder is not None:
        return _translator_plan(request, model, report)
    budget = request.budget(weight_count(model.spec))
    recipe = {} if budget else _given(request, model)
    if not request.measures:
        return Plan(recipe, ModelSources(model), None, [])
    from llmc.compiler.driver.budget import choose_formats, weigh_formats
    from llmc.compiler.driver.calibrate import calibrate
    from llmc.compiler.driver.original import Original, runs_in_parts
    from llmc.compiler.driver.probe import Probe
    from llmc.compiler.driver.texts import calibration_windows, sample_window

    texts = [] if request.calib is None else calibration_windows(model, request.calib, request.seed)
    windows = texts[:CHECK_WINDOWS] or [sample_window(model)]
    if not texts and budget is None and runs_in_parts(model.spec):  # nothing is measured but the result
        return Plan(recipe, ModelSources(model), Original(model, partial(report, "original")), windows)
    probe = Probe(model, partial(report, "original"))
    grams = calibrate(probe, texts, partial(report, "calibrate")) if texts else {}
    if budget is not None:
        trial = windows[:1]  # read once for every matrix
        choices = weigh_formats(probe, model, trial, grams, partial(report, "sensitivity"))
        recipe = choose_formats(probe, model, choices, budget)
    return Plan(recipe, ModelSources(model, grams), probe, windows)


def _translator_plan(request: Request, model: Any, report: Progress) -> Plan:
    """The plan of a model with an encoder: its formats are given, and what they cost is measured."""
    asked = {"--calib": request.calib, "--bpw": request.bpw, "--size": request.size}
    wrong = [name for name, value in asked.items() if value is not None]
    if wrong:
        raise LlmcError(f"{' and '.join(wrong)}: not for a model with an encoder; choose a format with --quant")
    recipe, sources = _given(request, model), ModelSources(model)
    if not request.measures:
        return Plan(recipe, sources, None, [])
    from llmc.compiler.driver.probe import Probe
    from llmc.compiler.driver.texts import answer_lead, sample_sources

    probe = Probe(model, partial(report, "original"))
    return Plan(recipe, sources, probe, sample_sources(model), answer_lead(model))


def _given(request: Request, model: Any) -> Recipe:
    """The recipe that needs no measuring."""
    if request.recipe is not None:
        return read_recipe(request.recipe, model)
    return keep(model) if request.quant == "auto" else uniform(model.spec, request.quant)
