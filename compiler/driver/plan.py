"""The recipe, and what is measured before weights are packed by it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.driver.recipe import Recipe, keep, read_recipe, uniform
from llmc.compiler.driver.request import Request
from llmc.compiler.driver.sources import COMPENSATED_BITS, ModelSources
from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import FORMATS, BlockFormat
from llmc.compiler.progress import Progress
from llmc.compiler.spec import weight_count
from llmc.targets.target import AnyTarget, cpu_flags

if TYPE_CHECKING:
    from llmc.compiler.driver.budget import Budget
    from llmc.compiler.driver.check import Answers, Loss, Texts
    from llmc.passes.quantize.equalize import Group

CHECK_WINDOWS = 2  # of a calibration text


@dataclass(frozen=True)
class Reading:
    """What weights are computed from; `original` is there when the result is compared with it."""

    source: ModelSources
    original: Texts | Answers | None = None


@dataclass
class Plan:
    """How a model is to be quantized, and what runs the unquantized one as far as that takes it, once it is needed."""

    recipe: Recipe
    read: Callable[[Progress], Reading]
    reading: Reading | None = None

    def source(self, report: Progress) -> ModelSources:
        """What weights are computed from."""
        self.reading = self.reading or self.read(report)
        return self.reading.source

    @property
    def scaled(self) -> bool:
        """Whether columns of weights were scaled."""
        return self.reading is not None and bool(self.reading.source.factors)

    def measure(self, artifact: Path, chosen: Sequence[AnyTarget], report: Progress) -> Loss | None:
        """What the artifact loses; None when that was not asked for or cannot run here."""
        runs_here = any(t.arch == platform.machine() and cpu_flags().issuperset(t.requires) for t in chosen)
        if self.reading is None or self.reading.original is None or not runs_here:
            return None
        from llmc.runtime.engine.freed_memory import give_back

        report("check", 0, 1)
        give_back()  # what packing took
        loss = self.reading.original.measure(artifact)
        report("check", 1, 1)
        return loss


def make_plan(request: Request, chosen: Sequence[AnyTarget], model: Any, report: Progress) -> Plan:
    """Read the recipe, or find it by running the unquantized model."""
    if model.spec.encoder is not None:
        return _translator_plan(request, model)
    from llmc.compiler.driver.texts import calibration_windows, sample_window

    budget = request.budget(weight_count(model.spec))
    texts = [] if request.calib is None else calibration_windows(model, request.calib, request.seed)
    windows = (texts[:CHECK_WINDOWS] or [sample_window(model)]) if request.measures else []
    if budget is not None:
        groups = scaled_groups(request, chosen, model, {}) if request.equalize else []
        recipe, found = _read_whole(model, {}, budget, groups, texts, windows, report)
        return Plan(recipe, lambda report: found)
    recipe = _given(request, model)

    def read(report: Progress) -> Reading:
        from llmc.compiler.driver.original import runs_in_parts

        groups = scaled_groups(request, chosen, model, recipe) if request.equalize else []
        if not windows and not groups:
            return Reading(ModelSources(model))
        if not texts and runs_in_parts(model.spec):
            return _read_in_parts(model, groups, windows, report)
        return _read_whole(model, recipe, None, groups, texts, windows, report)[1]

    return Plan(recipe, read)


def _read_in_parts(model: Any, groups: list[Group], windows: list[list[int]], report: Progress) -> Reading:
    """Of a model whose formats are given: reads all texts with one layer in memory."""
    from llmc.compiler.driver.check import Texts
    from llmc.compiler.driver.equalize import common, factors, for_groups
    from llmc.compiler.driver.original import Original
    from llmc.compiler.driver.texts import scaling_windows
    from llmc.runtime.engine.freed_memory import give_back

    scaling = scaling_windows(model) if groups else []
    wanted = {name for group in groups for name in group.matrices}
    expected, seen = Original(model, partial(report, "original")).run([*scaling, *windows], len(windows), wanted)
    give_back()  # what it took
    squares = for_groups(common(seen[: len(scaling)]), groups) if groups else {}
    source = ModelSources(model, squares=squares, factors=factors(model, groups, squares))
    return Reading(source, Texts(windows, expected) if windows else None)


def _read_whole(
    model: Any, recipe: Recipe, budget: Budget | None, groups: list[Group], texts: list[list[int]],
    windows: list[list[int]], report: Progress,
) -> tuple[Recipe, Reading]:  # fmt: skip
    """Of a model that is in memory while it reads: for calibration, and where formats are to be found."""
    from llmc.compiler.driver.budget import choose_formats, weigh_formats
    from llmc.compiler.driver.calibrate import calibrate, mean_squares, squares_of
    from llmc.compiler.driver.check import Texts
    from llmc.compiler.driver.equalize import COMPENSATED, common, factors, for_groups
    from llmc.compiler.driver.probe import Probe
    from llmc.compiler.driver.texts import scaling_windows

    probe = Probe(model, partial(report, "original"))
    grams = calibrate(probe, texts, partial(report, "calibrate")) if texts else {}
    seen = common(mean_squares(probe, scaling_windows(model))) if groups and not texts else squares_of(grams)
    squares = for_groups(seen, groups)
    source = ModelSources(model, grams, squares, factors(model, groups, squares, COMPENSATED if texts else 1))
    if budget is not None:
        trial = windows[:1]  # read once for every matrix
        choices = weigh_formats(probe, source, trial, partial(report, "sensitivity"))
        recipe = choose_formats(probe, model, choices, budget)
    expected = [probe.run(ids)[0] for ids in windows]
    whole = probe.hidden or not model.spec.attention.causal
    return recipe, Reading(source, Texts(windows, expected, probe.hidden, whole) if windows else None)


def scaled_groups(request: Request, chosen: Sequence[AnyTarget], model: Any, recipe: Recipe) -> list[Group]:
    """Columns that are worth scaling; without a recipe, whatever one may say.

    Codes of more bits than compensation is for are off by little: where activations stay floats, none of it matters.
    """
    from llmc.compiler.driver.equalize import worth_scaling
    from llmc.frontends.graph.build import build
    from llmc.passes.quantize.equalize import groups

    int8 = not all(map(request.exact, chosen))

    def rounded(name: str) -> bool:
        format = FORMATS[recipe[name]] if recipe else None
        coarse = isinstance(format, BlockFormat) and (int8 or format.code_bits <= COMPENSATED_BITS)
        return coarse or not recipe

    def stays(name: str) -> bool:
        kept = model.tensors[name].kept
        return kept is not None and (not recipe or recipe[name] == kept)

    if not any(rounded(name) and not stays(name) for name in recipe or model.tensors):
        return []  # without a graph
    return worth_scaling(groups(build(model.spec, "f32")), stays, rounded)


def _translator_plan(request: Request, model: Any) -> Plan:
    """The plan of a model with an encoder: its formats are given, and what they cost is measured."""
    asked = {"--calib": request.calib, "--bpw": request.bpw, "--size": request.size}
    wrong = [name for name, value in asked.items() if value is not None]
    if wrong:
        raise LlmcError(f"{' and '.join(wrong)}: not for a model with an encoder; choose a format with --quant")

    def read(report: Progress) -> Reading:
        if not request.measures:
            return Reading(ModelSources(model))
        from llmc.compiler.driver.check import Answers
        from llmc.compiler.driver.probe import Probe
        from llmc.compiler.driver.texts import answer_lead, sample_sources

        probe = Probe(model, partial(report, "original"))
        return Reading(ModelSources(model), Answers(probe, sample_sources(model), answer_lead(model)))

    return Plan(_given(request, model), read)


def _given(request: Request, model: Any) -> Recipe:
    """The recipe that needs no measuring."""
    if request.recipe is not None:
        return read_recipe(request.recipe, model)
    return keep(model) if request.quant == "auto" else uniform(model.spec, request.quant)
