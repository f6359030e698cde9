"""Lowering and building: refusals, and code for other machines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import tirx

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import block_format
from llmc.compiler.meaning import left_of
from llmc.compiler.ops import OPS
from llmc.compiler.ops.collective import STAYING
from llmc.compiler.ops.rounded import ATTENTION, ENDING
from llmc.compiler.spec import example
from llmc.frontends.graph.build import build
from llmc.passes.lift_weights import bundle_weights
from llmc.passes.pipeline import stages
from llmc.targets import target as targets
from llmc.targets.build import compile_module
from llmc.targets.knobs import Knobs
from llmc.targets.lower import KERNELS, lower, make_kernel

ON_DEVICES = {"rope_attention", *(name + ENDING for name in ATTENTION)}  # kernels of CUDA alone
# Rewritten by pack_weights, or computed at compile time.
REWRITTEN = {"embedding", "linear", "head_linear", "experts_in", "experts_out"}
WITHOUT_KERNEL = REWRITTEN | {"pack", "relative_bias", "qk_bias", "softplus"} | set(STAYING) | set(ON_DEVICES)


def _step(format: str) -> tvm.IRModule:
    module = build(example(), "bf16")
    for stage in stages(lambda name: format):
        module = stage.apply(module)
    return bundle_weights(module)


def _object(executable: object, path: Path) -> tvm.runtime.Module:
    (code,) = [m for m in (executable.mod, *executable.mod.imports) if m.kind == "llvm"]
    code.write_to_file(str(path), "o")
    return code


def test_every_op_has_a_kernel_or_is_gone_before_lowering() -> None:
    assert set(OPS) - set(KERNELS) == WITHOUT_KERNEL


def test_an_unpacked_module_is_refused_by_name() -> None:
    with pytest.raises(LlmcError, match=r"no kernel for llmc\.embedding, llmc\.linear; run the passes"):
        lower(build(example()), targets.native())


@pytest.mark.parametrize("near", [0, 2048])
def test_weights_of_few_rows_are_asked_for_far_ahead_and_nearer(near: int) -> None:
    """Into the second-level cache (2, as LLVM counts) and into the first (3): how many bytes ahead, of each line."""
    knobs = Knobs(few_rows=0, prefetch_far_bytes=8192, prefetch_near_bytes=near, tile_rows=0, pair_rows=0, panel_rows=0)
    target = replace(targets.variants("x86_64")[0], knobs=knobs)
    rows, format = tirx.Var("m", "int64"), block_format("q4_0")
    left = [[rows, part.shape[1]] for part in left_of(format, np.zeros((1, 128), np.float32))]
    shapes = [*left, list(format.packed_shape(64, 128)), [rows, 64]]
    code = make_kernel("i8_linear", target, shapes, {"format": "q4_0", "width": 64}).script()
    asked = re.findall(r"llvm\.prefetch.* \+ (\d+), \d+ - .*, 0, (\d), 1\)", code)
    assert {(4 * int(words), int(level)) for words, level in asked} == {(8192, 2), *[(near, 3)] * bool(near)}


@pytest.mark.thorough_if(case=lambda format: format in ("bf16", "q8"))
@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q4"])
def test_baselines_ask_for_nothing_newer_and_compile_for_arm(format: str, tmp_path: Path) -> None:
    x86 = targets.baseline("x86_64")
    code = _object(compile_module(lower(_step(format), x86), x86), tmp_path / "x86.o").inspect_source("ll")
    assert set(re.findall(r"llvm\.x86\.[a-z0-9]+", code)) <= {"llvm.x86.sse2"}
    assert "llvm.fma." not in code  # without the instruction it is a call for each lane
    arm = targets.baseline("aarch64")
    code = _object(compile_module(lower(_step(format), arm), arm), tmp_path / "arm.o").inspect_source("ll")
    assert not re.search("neon.(sdot|udot|usdot|ummla)", code)
    machine = (tmp_path / "arm.o").read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64


def test_target_facts_come_from_flags_alone() -> None:
    base = {"ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "avx2", "fma", "f16c"}
    avx512 = base | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

    def name(*flags: str, arch: str = "x86_64") -> str:
        return targets.native(frozenset(flags), arch).name

    bf16 = avx512 | {"avx512_vnni", "avx512vbmi", "avx512_bf16"}
    assert name(*bf16, "amx_tile", "amx_int8", "amx_bf16") == "cpu-amx_int8"
    assert name(*bf16) == "cpu-avx512_bf16"
    assert name(*avx512, "avx512_vnni", "avx512vbmi") == "cpu-avx512_vbmi"
    assert name(*avx512, "avx512_vnni") == "cpu-avx512_vnni"
    assert name(*avx512) == "cpu-avx512f"
    assert name(*base, "avx_vnni") == "cpu-avx_vnni"
    assert name(*base) == "cpu-avx2"
    assert name("asimd", "asimddp", "i8mm", arch="aarch64") == "cpu-i8mm"
    assert name("asimd", "asimddp", arch="aarch64") == "cpu-asimddp"
    assert name("asimd", arch="aarch64") == "cpu-aarch64"
    partial = targets.native(frozenset(base | {"avx512f", "avx512_vnni"}), "x86_64")
    assert partial.name == "cpu-avx2"
    assert not any(flag.startswith("avx512") for flag in partial.requires)
    assert targets.native(frozenset({"sse4_1"}), "x86_64").requires == ()


@pytest.mark.parametrize("arch", targets.ARCHITECTURES)
def test_variants_are_ordered_and_the_last_runs_everywhere(arch: str) -> None:
    found = targets.variants(arch)
    assert set(found[-1].requires) <= {"asimd"}  # which every 64-bit Arm that Linux runs on has
    for index, variant in enumerate(found):
        assert not any(set(better.requires) <= set(variant.requires) for better in found[:index]), variant
        assert targets.get(variant.name.replace("-", ":", 1))[0] == variant or variant is found[-1]
    assert targets.get(f"cpu:{arch}") == found
    assert targets.get("cpu:native") == targets.get("cpu") == (targets.native(),)


def test_only_code_that_nothing_newer_changes_serves_another_variant() -> None:
    x86 = {target.name: target for target in targets.variants("x86_64")}
    assert x86["cpu-avx512f"].serves(x86["cpu-avx512_vbmi"])
    assert x86["cpu-avx512f"].serves(x86["cpu-avx512_bf16"])
    assert x86["cpu-avx2"].serves(x86["cpu-avx_vnni"])
    assert not x86["cpu-avx2"].serves(x86["cpu-avx512f"])
    assert not x86["cpu-avx512_vnni"].serves(x86["cpu-avx512f"])
    assert not targets.baseline("aarch64").serves(x86["cpu-x86_64"])


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(LlmcError, match=r"unknown target 'gpu'; llmc knows: cpu, cpu:native, cpu:portable, .*cpu:avx2"):
        targets.get("gpu")
