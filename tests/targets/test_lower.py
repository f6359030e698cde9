"""Lowering and building: refusals, and code for other machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm

from llmc.compiler.errors import LlmcError
from llmc.compiler.ops import OPS
from llmc.compiler.spec import example
from llmc.frontends.graph.build import build
from llmc.passes.lift_weights import bundle_weights
from llmc.passes.pipeline import stages
from llmc.targets import target as targets
from llmc.targets.build import compile_module
from llmc.targets.lower import KERNELS, lower

# Rewritten by pack_weights, or computed at compile time.
REWRITTEN = {"embedding", "linear", "head_linear", "experts_in", "experts_out"}
WITHOUT_KERNEL = REWRITTEN | {"pack", "relative_bias", "qk_bias", "softplus"}


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


@pytest.mark.parametrize("format", ["f32", "bf16", "q8", "q4"])
def test_portable_code_has_no_intrinsics_and_compiles_for_arm(format: str, tmp_path: Path) -> None:
    x86 = targets.get("cpu:x86_64")
    code = _object(compile_module(lower(_step(format), x86), x86), tmp_path / "x86.o")
    assert "llvm.x86" not in code.inspect_source("ll")
    arm = targets.get("cpu:aarch64")
    _object(compile_module(lower(_step(format), arm), arm), tmp_path / "arm.o")
    machine = (tmp_path / "arm.o").read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64


def test_target_facts_come_from_flags_alone() -> None:
    base = {"ssse3", "sse4_1", "avx", "avx2", "fma", "f16c"}
    avx512 = base | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert targets.native(frozenset(avx512 | {"avx512_vnni"}), "x86_64").name == "cpu-avx512_vnni"
    assert targets.native(frozenset(avx512), "x86_64").name == "cpu-avx512f"
    assert targets.native(frozenset(base), "x86_64").name == "cpu-avx2"
    partial = targets.native(frozenset(base | {"avx512f", "avx512_vnni"}), "x86_64")
    assert partial.name == "cpu-avx2"
    assert not any(flag.startswith("avx512") for flag in partial.requires)
    assert targets.native(frozenset({"sse4_1"}), "x86_64").requires == ()


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(LlmcError, match=r"unknown target 'gpu'; llmc knows: cpu, cpu:portable"):
        targets.get("gpu")
