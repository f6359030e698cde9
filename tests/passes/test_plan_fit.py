"""Rates from times: what the planner predicts of a known device leads back to that device."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.passes.plan.devices import Devices
from llmc.passes.plan.fit import Timed, fit
from llmc.passes.plan.held import Model
from llmc.passes.plan.predict import predict
from llmc.passes.plan.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from plan_cases import TWO, devices, shape

KNOWN = TWO + "layer_us = 30\nstream_gb_s = { q8 = 6, c4 = 4, kv = 3 }\n"


def _timed(model: Model, found: Devices, formats: str) -> Timed:
    def step(context: int) -> tuple[float, float]:
        work = Workload(context, 1, 1)
        return context, predict(model.spec, formats, found, "0", work).token_s

    prompt = predict(model.spec, formats, found, "0", Workload(512, 1, 1)).first_token_s
    return Timed(model, step(16), step(1016), (512, prompt))


def test_a_device_is_found_again() -> None:
    found = devices(KNOWN)
    samples = []
    for layers, hidden, formats in ((4, 256, "q8"), (12, 256, "q8"), (6, 1024, "q8"), (4, 512, "c4"), (20, 256, "c4")):
        model = Model(shape(layers=layers, hidden=hidden), formats, "bf16")
        samples.append(_timed(model, found, formats))
    got = fit(samples, 10e9, 200e9)
    assert got.layer_s == pytest.approx(30e-6, rel=0.02)
    assert got.streams["q8"] == pytest.approx(6e9, rel=0.02)
    assert got.streams["c4"] == pytest.approx(4e9, rel=0.02)
    assert got.streams["kv"] == pytest.approx(3e9, rel=0.02)
    assert got.ops["int8"] == pytest.approx(400e9, rel=0.15)


def test_what_steps_of_several_queries_show_is_found_again() -> None:
    """Tokens that cost time by themselves, and multiplying that reading does not hide."""
    known = KNOWN + "row_us = 40\nexposed = 0.4\n"
    samples = []
    for layers, hidden in ((4, 256), (12, 256), (6, 1024), (10, 1024)):
        model = Model(shape(layers=layers, hidden=hidden), "q8", "bf16")
        round_of_all = 8 / predict(model.spec, "q8", devices(known), "0", Workload(16, 1, 8)).tokens_per_s
        samples.append(replace(_timed(model, devices(known), "q8"), batch=(8, round_of_all)))
    got = fit(samples, 10e9, 200e9)
    assert got.exposed == pytest.approx(0.4, rel=0.2)
    assert got.row_s == pytest.approx(40e-6, rel=0.2)
    assert got.streams["q8"] == pytest.approx(6e9, rel=0.05)


def test_what_is_not_hidden_is_a_part() -> None:
    model = Model(shape(layers=8), "q8", "bf16")
    sample = _timed(model, devices(KNOWN), "q8")
    assert fit([replace(sample, batch=(8, sample.near[1] / 10))], 10e9, 200e9).exposed == 0
    assert fit([replace(sample, batch=(8, sample.near[1] * 100))], 10e9, 200e9).exposed == 1


@pytest.mark.parametrize("hidden", [256, 1024])
def test_one_sample_explains_itself(hidden: int) -> None:
    """With one artifact the split into bytes and layers is a guess, but its own time comes out again."""
    found, model = devices(KNOWN), Model(shape(layers=8, hidden=hidden), "q8", "bf16")
    sample = _timed(model, found, "q8")
    got = fit([sample], 10e9, 200e9)
    streams = ", ".join(f"{name} = {rate / 1e9}" for name, rate in got.streams.items())
    again = devices(TWO + f"layer_us = {got.layer_s * 1e6}\nstream_gb_s = {{ {streams} }}\n")
    assert predict(model.spec, "q8", again, "0", Workload(16, 1, 1)).token_s == pytest.approx(sample.near[1], rel=0.01)
