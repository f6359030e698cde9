"""The search of knobs, on a machine whose times are known; and on this one, for kernels that are small."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.driver.tuning.database import Database, Entry, Section, read_database, write_database
from llmc.compiler.driver.tuning.machine import ThisMachine
from llmc.compiler.driver.tuning.model_kernels import Kernel, tunable
from llmc.compiler.driver.tuning.operands import operands_for
from llmc.compiler.driver.tuning.search import ROWS, Budget, State, search
from llmc.compiler.errors import LlmcError
from llmc.compiler.ops import OPS
from llmc.targets import target as targets
from llmc.targets.knobs import CANDIDATES, Knobs
from llmc.targets.lower import KERNELS, KernelCall
from llmc.targets.tuned import shipped

sys.path.insert(0, str(Path(__file__).parent))
from fake_machine import FakeMachine, kernel

DEFAULT = Knobs()


def _favour(prefetch_bytes: int, row_block: int) -> Callable[[Kernel, Knobs, int], float]:
    """Times that are the better the nearer both knobs are; the second one matters to a prompt alone."""

    def times(kernel: Kernel, knobs: Knobs, rows: int) -> float:
        seconds = 1 + 0.1 * abs(CANDIDATES["prefetch_bytes"].index(prefetch_bytes) - _place(knobs))
        far = CANDIDATES["row_block"].index(row_block) - CANDIDATES["row_block"].index(knobs.row_block)
        return 1e-5 * rows * (seconds + (0.2 * abs(far) if rows == ROWS[-1] else 0))

    return times


def _place(knobs: Knobs) -> int:
    return CANDIDATES["prefetch_bytes"].index(knobs.prefetch_bytes)


def _run(machine: FakeMachine, kernels: list[Kernel], section: Section, trials: int | None = None) -> dict[str, str]:
    return search(kernels, machine, section, Budget(trials), lambda state: None, lambda: None)


def test_each_kernel_gets_the_knobs_that_are_fastest_for_it() -> None:
    near, far = _favour(4096, 64), _favour(0, 512)
    machine = FakeMachine(lambda k, knobs, rows: (near if k.call.attrs["format"] == "q4" else far)(k, knobs, rows))
    section, kernels = Section(), [kernel("q4"), kernel("q8")]
    _run(machine, kernels, section)
    best = [section.kernels[k.key].best for k in kernels]
    assert best == [{"prefetch_bytes": 4096, "row_block": 64}, {"prefetch_bytes": 0, "row_block": 512}]
    times = section.kernels[kernels[0].key].microseconds
    assert list(times) == [str(rows) for rows in ROWS]
    assert all(after < before for before, after in times.values())


def test_knobs_that_a_kernel_does_not_read_are_not_tried() -> None:
    machine, section, one = FakeMachine(_favour(4096, 64)), Section(), kernel("q4", "row_block")
    _run(machine, [one], section)
    assert section.kernels[one.key].best == {"row_block": 64}
    assert {knobs.prefetch_bytes for _, knobs in machine.built} == {DEFAULT.prefetch_bytes}


def test_what_is_slower_for_some_number_of_rows_is_not_taken() -> None:
    def times(kernel: Kernel, knobs: Knobs, rows: int) -> float:
        return 1e-3 * (1.0 if knobs == DEFAULT else 0.5 if rows == 1 else 1.1)

    section, one = Section(), kernel("q4")
    _run(FakeMachine(times), [one], section)
    assert section.kernels[one.key].best == section.kernels[one.key].default


def test_equal_times_leave_the_default() -> None:
    section, one = Section(), kernel("q4")
    _run(FakeMachine(lambda kernel, knobs, rows: 1e-3), [one], section)
    assert section.kernels[one.key].best == section.kernels[one.key].default


def test_a_gain_that_does_not_come_again_is_not_taken() -> None:
    """Fast as long as it is measured for a short time."""
    seen: dict[tuple[Knobs, int], int] = {}

    def times(kernel: Kernel, knobs: Knobs, rows: int) -> float:
        seen[knobs, rows] = seen.get((knobs, rows), 0) + 1
        return 1e-3 * (0.5 if knobs.prefetch_bytes == 4096 and seen[knobs, rows] <= 8 else 1.0)

    section, one = Section(), kernel("q4", "prefetch_bytes")
    _run(FakeMachine(times), [one], section)
    entry = section.kernels[one.key]
    assert entry.best == {"prefetch_bytes": DEFAULT.prefetch_bytes}
    assert [tried.verdict for tried in entry.tried if tried.knobs["prefetch_bytes"] == 4096] == ["fails"]


@pytest.mark.parametrize("share", [1, 3, 7])
def test_a_search_goes_on_where_its_budget_ended(share: int, tmp_path: Path) -> None:
    kernels = [kernel("q4"), kernel("q8")]
    whole = Database({"t": Section()})
    first = FakeMachine(_favour(1024, 256))
    _run(first, kernels, whole.targets["t"])
    path, trials, done = tmp_path / "db.json", 0, False
    while not done:
        database = read_database(path) if path.exists() else Database({"t": Section()})
        budget, machine = Budget(share), FakeMachine(_favour(1024, 256))
        search(kernels, machine, database.targets["t"], budget, lambda s: None, lambda: None)
        write_database(path, database)
        assert budget.used <= share
        trials += budget.used
        done = all(k.key in database.targets["t"].kernels for k in kernels) and all(
            entry.best is not None for entry in database.targets["t"].kernels.values()
        )
    assert path.read_text() == whole.text()
    assert trials == len(first.built) - len(kernels)  # each default is built once, all else is a trial


def test_what_was_tried_is_kept_when_the_search_is_interrupted(tmp_path: Path) -> None:
    path, one, database = tmp_path / "db.json", kernel("q4"), Database({"t": Section()})
    left = [200]

    def before() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    machine = FakeMachine(_favour(4096, 64), before=before)
    with pytest.raises(KeyboardInterrupt):
        search([one], machine, database.targets["t"], Budget(), lambda s: None,
               lambda: write_database(path, database))  # fmt: skip
    kept = read_database(path).targets["t"].kernels[one.key]
    assert kept.best is None
    assert len(kept.tried) == 4  # 200 measurements are 8 to begin with, 40 a candidate
    assert [file.name for file in tmp_path.iterdir()] == ["db.json"]


def test_minutes_bound_a_search() -> None:
    now = [0.0]
    machine = FakeMachine(_favour(4096, 64))
    machine.before = lambda: now.__setitem__(0, now[0] + 1)
    section, budget = Section(), Budget(None, 100.0, clock=lambda: now[0])
    search([kernel("q4")], machine, section, budget, lambda s: None, lambda: None)
    assert budget.used == 3  # 8 measurements to begin with, 40 a candidate; the third begins at 88


def test_a_knob_that_changes_results_is_a_bug_that_names_the_kernel() -> None:
    machine = FakeMachine(_favour(4096, 64), wrong=Knobs(prefetch_bytes=512))
    with pytest.raises(LlmcError, match=r"i8_linear computes something else for 1 rows .*'prefetch_bytes': 512"):
        _run(machine, [kernel("q4")], Section())


def test_a_kernel_without_operands_is_left_out_and_said_so() -> None:
    section, kernels = Section(), [kernel("q8"), kernel("q4")]
    assert _run(FakeMachine(_favour(4096, 64), unknown="q8"), kernels, section) == {kernels[0].key: "no operands"}
    assert section.kernels[kernels[1].key].best == {"prefetch_bytes": 4096, "row_block": 64}


def test_other_threads_or_another_default_begin_anew() -> None:
    one = kernel("q4")
    section = Section({one.key: Entry({"prefetch_bytes": 2048, "row_block": 128}, 2, best={"row_block": 32})})
    _run(FakeMachine(_favour(4096, 64)), [one], section)
    assert section.kernels[one.key].best == {"prefetch_bytes": 4096, "row_block": 64}
    section.kernels[one.key].default["row_block"] = 256
    _run(FakeMachine(_favour(0, 64)), [one], section)
    assert section.kernels[one.key].best == {"prefetch_bytes": 0, "row_block": 64}


def test_progress_says_which_kernel_and_the_best_so_far() -> None:
    states: list[State] = []
    search([kernel("q4"), kernel("q8")], FakeMachine(_favour(4096, 64)), Section(), Budget(), states.append,
           lambda: None)  # fmt: skip
    assert (states[0].number, states[-1].number, states[-1].kernels) == (1, 2, 2)
    assert states[-1].title == f"kernel 2 of 2, i8_linear q8, trial {states[-1].trials}"
    assert states[-1].changed == states[-1].knobs
    assert states[-1].gain > 1.1
    assert states[-1].knobs == {"prefetch_bytes": 4096, "row_block": 64}


# --- kernels as they are ---


def _linear(kind: str, format: str, outputs: int = 64, columns: int = 256) -> KernelCall:
    from tvm import tirx

    from llmc.compiler.formats import FORMATS, BlockFormat

    m, packing = tirx.Var("m", "int64"), FORMATS[format]
    totals = "int32" if isinstance(packing, BlockFormat) and packing.whole else "float32"  # starts or sums
    left = {
        "packed": [([m, columns], "float32")],
        "bf16": [([m, columns // 2], "int32")],
        "i8": [([m, columns // 4], "int32"), ([m, columns // 32], "float32"), ([m, 3 * columns // 32], totals)],
    }[kind]
    operands = [*left, (list(packing.packed_shape(outputs, columns)), packing.dtype), ([m, outputs], "float32")]
    shapes, dtypes = [shape for shape, _ in operands], [dtype for _, dtype in operands]
    return KernelCall(f"{kind}_linear", shapes, dtypes, {"format": format, "width": outputs}, 1)


@pytest.mark.parametrize("format", ["q8", "c3"])
@pytest.mark.thorough_if(case=lambda format: format == "c3")
def test_a_kernel_runs_on_its_operands_and_knobs_do_not_change_it(format: str) -> None:
    target = targets.native()
    (one,) = tunable({"k": _linear("i8", format)}, target)
    machine = ThisMachine(target, 1, 1 << 16)
    for rows in (1, 4):
        bench = machine.bench(one, rows)
        codes = [machine.build(one, knobs) for knobs in (DEFAULT, Knobs(prefetch_bytes=0, row_block=32))]
        assert len({bench.result(code) for code in codes}) == 1
        assert all(bench.seconds(code, 3) > 0 for code in codes)


@pytest.mark.parametrize(
    ("kind", "format"),
    [("packed", "f32"), ("packed", "q5"), ("bf16", "bf16"), ("i8", "c4"), ("i8", "q4_k"), ("i8", "q3h")],
)
def test_operands_are_such_that_an_op_computes_numbers(kind: str, format: str) -> None:
    call = _linear(kind, format)
    operands = operands_for(call, 5)
    result = OPS[call.name].meaning(*operands.inputs, **call.attrs)
    assert np.isfinite(result).all()
    assert operands.outputs == [((5, 64), "float32")]
    assert [len(operands.inputs) - 1] == list(operands.cold)


def _experts_and_attention() -> list[KernelCall]:
    """Kernels of ops that have indexes for operands."""
    from tvm import tirx

    from llmc.compiler.formats import FORMATS
    from llmc.compiler.kv_pages import page_shape

    m, s, e, p, n = (tirx.Var(name, "int64") for name in "msepn")
    rows = {"in": [[m, 2], list(FORMATS["f32"].packed_shape(4 * 32, 64)), [m, 64]],
            "out": [[m, 2], [m, 2], list(FORMATS["f32"].packed_shape(4 * 64, 32)), [m, 64]]}  # fmt: skip
    kinds = {"in": ["int32", "float32", "float32"], "out": ["int32", "float32", "float32", "float32"]}
    calls = [
        KernelCall(f"packed_experts_{way}", [[m, 64], *rows[way]], ["float32", *kinds[way]],
                   {"format": "f32", "experts": 4, "width": {"in": 32, "out": 64}[way]}, 1)
        for way in rows
    ]  # fmt: skip
    weight = list(FORMATS["q4"].packed_shape(4 * 64, 128))
    results = [[m, 32], [m, 4], [m, 12], [m, 12]]
    gated = KernelCall(
        "i8_experts_gated_i8", [[m, 32], [m, 4], [m, 12], [m, 2], weight, weight, *results],
        ["int32", "float32", "float32", "int32", "int32", "int32", "int32", "float32", "float32", "int32"],
        {"format": "q4", "experts": 4, "width": 64, "activation": "silu"}, 1,
    )  # fmt: skip
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 0.25, "kv_dtype": "q8"}
    paged = [[m], [m], [s, 2], [e], [p]]
    attrs = {**sizes, "window": 0, "soft_cap": 0.0, "bias": "none", "causal": 1}
    pages = [n, *page_shape("q8", 2, 16)]
    return [
        *calls,
        gated,
        KernelCall("attention", [[m, 128], pages, *paged, [m, 64]], ["float32", "uint8", *["int32"] * 5, "float32"],
                   attrs, 1),
        KernelCall("cross_attention", [[m, 64], pages, [m], [s], [e], [p], [m, 64]],
                   ["float32", "uint8", *["int32"] * 4, "float32"], sizes, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("call", _experts_and_attention(), ids=lambda call: call.name)
@pytest.mark.parametrize("rows", [3, 70])
def test_indexes_are_such_that_an_op_computes_numbers(call: KernelCall, rows: int) -> None:
    operands = operands_for(call, rows)
    results = OPS[call.name].meaning(*operands.inputs, **call.attrs)
    assert all(np.isfinite(each).all() for each in (results if isinstance(results, tuple) else (results,)))


def test_operands_that_nobody_knows_are_refused_by_name() -> None:
    call = KernelCall("take_rows", [[4, 8], [4], [4, 8]], ["float32", "int32", "float32"], {}, 1)
    with pytest.raises(LlmcError, match=r"llmc\.take_rows: no values are known for its operand 'rows'"):
        operands_for(call, 4)


def test_only_kernels_that_read_a_knob_are_tuned_the_heaviest_first() -> None:
    from tvm import tirx

    norm = KernelCall("rms_norm", [[tirx.Var("m", "int64"), 64], [64], [4, 64]], ["float32"] * 3, {"eps": 1e-5}, 1)
    calls = {"small": _linear("i8", "q4"), "norm": norm, "large": _linear("i8", "q4", outputs=640)}
    found = tunable(calls, targets.native())
    assert [one.key for one in found] == ["large", "small"]
    assert {"prefetch_far_bytes", "row_block"} <= set(found[0].knobs)
    assert found[0].default == shipped(targets.native()).knobs(
        targets.native().knobs, "i8_linear", [], {"format": "q4"}
    )
    assert set(OPS) >= {one.call.name for one in found} <= set(KERNELS)
