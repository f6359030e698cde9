"""Knobs by kernel: which are there, who reads them, and that lowering gives each kernel its own."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import tvm
from tvm import tirx

from llmc.compiler.spec import example
from llmc.frontends.graph.build import build
from llmc.passes.lift_weights import bundle_weights
from llmc.passes.pipeline import stages
from llmc.targets import lower as lowering
from llmc.targets import target as targets
from llmc.targets import tuned
from llmc.targets.knobs import CANDIDATES, Knobs, Watched
from llmc.targets.lower import KERNELS, kernel_calls, lower, make_kernel
from llmc.targets.tuned import Tuned, family_key, kernel_key, shipped


@pytest.fixture(scope="module")
def step() -> tvm.IRModule:
    module = build(example(), "bf16")
    for stage in stages(lambda name: "q4"):
        module = stage.apply(module)
    return bundle_weights(module)


def test_every_knob_has_candidates_and_its_default_is_one_of_them() -> None:
    """A new knob needs its line in CANDIDATES (targets/knobs.py)."""
    assert {field.name for field in fields(Knobs)} == set(CANDIDATES)
    for knobs in (Knobs(), targets.baseline("x86_64").knobs):
        assert all(getattr(knobs, name) in values for name, values in CANDIDATES.items())
    assert all(len(set(values)) == len(values) for values in CANDIDATES.values())


def test_knobs_remember_what_was_read_of_them() -> None:
    watched = Watched(row_block=64)
    assert (watched.row_block, watched.read()) == (64, ["row_block"])
    again = Watched()
    assert again.read() == []
    assert [again.row_block, again.prefetch_bytes] == [Knobs().row_block, Knobs().prefetch_bytes]
    assert again.read() == ["prefetch_bytes", "row_block"]


def test_every_kernel_of_a_module_is_listed_once_and_how_often_it_is_called(step: tvm.IRModule) -> None:
    calls = kernel_calls(step)
    lowered = lower(step, targets.native())
    made = [f for f in lowered.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert len(calls) == len(made)
    linears = [call for call in calls.values() if call.name == "i8_linear"]
    layers = example().sizes.layers
    assert all(call.count % layers == 0 for call in linears if call.attrs["width"] != example().sizes.vocab)
    assert all(len(call.dtypes) == len(call.shapes) for call in calls.values())


def test_each_kernel_is_made_with_its_own_knobs(step: tvm.IRModule, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = sorted(key for key, call in kernel_calls(step).items() if call.name == "i8_linear")
    found = Tuned(exact={linears[0]: {"row_block": 32}, "of another model": {"row_block": 512}},
                  families={"i8_linear q4": {"prefetch_bytes": 512}, "rms_norm": {"row_block": 64}},
                  every={"prefetch_far_bytes": 2048})  # fmt: skip
    got: dict[str, Knobs] = {}

    def watched(name: str, target: targets.Target, shapes: list[Any], attrs: dict[str, Any]) -> tirx.PrimFunc:
        got[kernel_key(name, shapes, attrs)] = target.knobs
        return make_kernel(name, target, shapes, attrs)

    monkeypatch.setattr(lowering, "make_kernel", watched)
    target = replace(targets.native(), knobs=Knobs(prefetch_bytes=4096))
    lower(step, target, found)
    assert got[linears[0]] == Knobs(prefetch_bytes=4096, prefetch_far_bytes=2048, row_block=32)
    family = Knobs(prefetch_bytes=512, prefetch_far_bytes=2048)
    assert all(got[key] == family for key in linears[1:] if " format=q4 " in key)
    rest = {key: knobs for key, knobs in got.items() if not key.startswith(("i8_linear", "rms_norm"))}
    assert set(rest.values()) == {replace(target.knobs, prefetch_far_bytes=2048)}


def test_keys_tell_kernels_apart_and_not_by_what_sizes_are_called() -> None:
    m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    attrs = {"width": 16, "format": "q4"}
    assert kernel_key("i8_linear", [[m, 8], [2, 4]], attrs) == kernel_key("i8_linear", [[n, 8], [2, 4]], attrs)
    assert kernel_key("a", [[m, n]], {}) != kernel_key("a", [[m, m]], {})
    assert kernel_key("a", [[m, 8]], {"width": 16}) != kernel_key("a", [[m, 8]], {"width": 32})
    assert family_key("i8_linear_gated_i8", attrs) == "i8_linear q4"
    assert [family_key("i8_linear", attrs), family_key("rms_norm", {"eps": 1.0})] == ["i8_linear q4", "rms_norm"]


def test_shipped_defaults_are_knobs_of_kernels_there_are() -> None:
    for entry in tuned._entries():
        assert set(entry) - {"every", "wide"} == {"arch", "requires", "families"}
        assert entry["requires"] == sorted(entry["requires"])
        for known in (entry, entry.get("wide", {"families": {}})):
            for family, knobs in known["families"].items():
                assert family.split()[0] in KERNELS
                assert all(value in CANDIDATES[name] for name, value in knobs.items())
            assert all(value in CANDIDATES[name] for name, value in known.get("every", {}).items())


def test_what_is_known_of_wide_rows_counts_for_them_alone() -> None:
    wide = Tuned(families={"i8_linear c4": {"few_rows": 0}}, every={"few_rows": 1})
    found = Tuned(families={"i8_linear q4_k": {"few_rows": 0}}, every={"prefetch_bytes": 256}, wide=wide)

    def few(columns: int, format: str) -> Knobs:
        shapes = [["m", columns // 4], ["m", columns // 32], [8, 100], ["m", 128]]
        return found.knobs(Knobs(), "i8_linear", shapes, {"format": format, "width": 128})

    assert few(2048, "c4") == few(2048, "q4") == Knobs(prefetch_bytes=256)
    assert few(4096, "c4") == few(4096, "q4_k") == few(2048, "q4_k") == Knobs(prefetch_bytes=256, few_rows=0)
    assert few(4096, "q4") == Knobs(prefetch_bytes=256, few_rows=1)


def test_of_shipped_defaults_that_fit_a_cpu_one_is_the_most_alike() -> None:
    """Two that each have a flag of their own: one more has the flags of both, and as much as is known of such a CPU."""
    for one, other in itertools.combinations(tuned._entries(), 2):
        flags = {*one["requires"], *other["requires"]}
        counts = [len(entry["requires"]) for entry in tuned._entries() if flags >= set(entry["requires"])]
        assert counts.count(max(counts)) == 1


def test_shipped_defaults_are_those_of_the_most_alike_cpu_that_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"arch": "x86_64", "requires": ["avx2", "fma"], "families": {"i8_linear q4": {"row_block": 32}}},
        {
            "arch": "x86_64",
            "requires": ["avx2", "avx512f", "fma"],
            "families": {"i8_linear q4": {"row_block": 64}},
            "every": {"row_block": 512, "prefetch_bytes": 256},
        },
        {"arch": "aarch64", "requires": [], "families": {"i8_linear q4": {"row_block": 256}}},
    ]
    monkeypatch.setattr(tuned, "_entries", lambda: entries)

    def knobs(arch: str, *flags: str, format: str = "q4") -> Knobs:
        found = shipped(targets.Target("t", arch, flags))
        return found.knobs(Knobs(), "i8_linear", [], {"format": format})

    assert knobs("x86_64", "fma", "avx2", "sse4_1") == Knobs(row_block=32)
    wide = ("fma", "avx2", "avx512f", "avx512_vnni")
    assert knobs("x86_64", *wide) == Knobs(row_block=64, prefetch_bytes=256)
    assert knobs("x86_64", *wide, format="q8") == Knobs(row_block=512, prefetch_bytes=256)
    assert knobs("x86_64", "fma") == Knobs()
    assert knobs("aarch64") == Knobs(row_block=256)
