"""Text without end on the NumPy step: each row equals one computed with just the tokens that it should see."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.runtime.cache.pages import PagePool, Sequence
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.window import Window, visible, window_of
from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import KvGroup, KvLayout
from llmc.runtime.runner import Feed, Runner

SIZE = 32
SLIDING = ("rope", "interleaved", "partial", "partial interleaved", "alibi", "none")
ROPE = ("rope", "interleaved", "partial", "partial interleaved")
TEXT = [int(i) for i in np.random.default_rng(5).integers(0, 97, 110)]


@pytest.fixture(scope="session")
def endless(script: Callable[[str], ModuleType]) -> ModuleType:
    """The module endless_step.py."""
    return script("tests/runtime/endless_step.py")


@pytest.fixture
def make_runner(endless: ModuleType) -> Callable[..., Runner]:
    """A function `(place, pages=64, groups=()) -> Runner`."""

    def make(place: str, pages: int = 64, groups: tuple[KvGroup, ...] = ()) -> Runner:
        pool = PagePool(KvLayout(endless.LAYERS, endless.GROUPS, endless.SIZE, "f32", groups), pages * 16)
        step, turn = endless.make_functions(endless.make_weights(), pool.layers, endless.PLACES[place])
        modes = {"learned": ("reevaluate",), "rope": ("sinks", "shift", "reevaluate")}
        can = modes.get(endless.PLACES[place].kind, ("sinks", "reevaluate"))
        return Runner(step, pool, endless.VOCAB, endless.CONTEXT, turn_function=turn, endless=can)

    return make


def kept(mode: str, keep: int, discard: int, size: int, count: int) -> list[list[int]]:
    """Which tokens each of `count` rows sees, told as docs/endless.md does: by a list and nothing else."""
    rows, seen = [], list[int]()
    for token in range(count):
        if len(seen) == size:
            first = -keep % 16 if mode == "sinks" and seen == list(range(size)) else 0
            seen = seen[:keep] + seen[keep + max(discard, first) :]
        seen.append(token)
        rows.append(list(seen))
    return rows


def say(window: Window, runner: Runner, sequence: Sequence, ids: list[int], rows: int) -> NDArray[np.float32]:
    """Logits (N, V) of the text `ids`, at most `rows` in a step."""
    found, at = [], 0
    while at < len(ids):
        again = window.make_room(runner, sequence, lambda at=at: ids[:at])
        if again:
            runner.prefill([(sequence, again)])
        new = ids[at : at + min(rows, window.rows(sequence))]
        found.append(runner.step([Feed(sequence, new, "all")]).logits)
        assert len(sequence.pages) <= window.pages
        runner.pool.check([sequence])
        at += len(new)
    return np.concatenate(found)


@pytest.mark.parametrize(("discard", "rows"), [(1, 1), (16, 7)])
@pytest.mark.parametrize("place", SLIDING)
def test_sinks_and_recent_tokens_are_what_a_row_sees(
    make_runner: Callable[..., Runner], endless: ModuleType, place: str, discard: int, rows: int
) -> None:
    runner = make_runner(place)
    window = window_of(Options(endless="sinks", n_discard=discard, window=SIZE), runner)
    assert window is not None
    got = say(window, runner, runner.new_sequence(), TEXT, rows)
    wanted = endless.by_rows(
        endless.make_weights(), endless.PLACES[place], TEXT, kept("sinks", 4, discard, SIZE, len(TEXT))
    )
    np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("keep", [0, 16, 20])
@pytest.mark.parametrize("place", ["rope", "alibi"])
def test_any_number_of_sinks(make_runner: Callable[..., Runner], endless: ModuleType, place: str, keep: int) -> None:
    runner = make_runner(place)
    window = window_of(Options(endless="sinks", n_keep=keep, n_discard=5, window=40), runner)
    assert window is not None
    got = say(window, runner, runner.new_sequence(), TEXT, 3)
    seen = kept("sinks", keep, 5, 40, len(TEXT))
    np.testing.assert_allclose(
        got, endless.by_rows(endless.make_weights(), endless.PLACES[place], TEXT, seen), atol=2e-5
    )


@pytest.mark.parametrize(("discard", "keep"), [(1, 0), (16, 4)])
@pytest.mark.parametrize("place", ROPE)
def test_shift_shows_the_same_with_all_recent_keys_turned(
    make_runner: Callable[..., Runner], endless: ModuleType, place: str, discard: int, keep: int
) -> None:
    runner = make_runner(place)
    window = window_of(Options(endless="shift", n_keep=keep, n_discard=discard, window=SIZE), runner)
    assert window is not None
    sequence = runner.new_sequence()
    got = say(window, runner, sequence, TEXT, 4)
    seen = kept("shift", keep, discard, SIZE, len(TEXT))
    np.testing.assert_allclose(
        got, endless.by_rows(endless.make_weights(), endless.PLACES[place], TEXT, seen), atol=2e-4
    )
    assert sequence.position == visible(sequence)


@pytest.mark.parametrize(("place", "discard"), [("learned", None), ("rope", None), ("alibi", 1)])
def test_what_is_read_again_is_a_text_of_its_own(
    make_runner: Callable[..., Runner], endless: ModuleType, place: str, discard: int | None
) -> None:
    runner = make_runner(place)
    window = window_of(Options(endless="reevaluate", n_discard=discard, window=SIZE), runner)
    assert window is not None
    got = say(window, runner, runner.new_sequence(), TEXT[:80], 5)
    seen = kept("reevaluate", 4, discard or 14, SIZE, 80)
    for row in (31, 32, 45, 46, 79):
        ids = [TEXT[token] for token in seen[row]]
        alone = endless.by_rows(
            endless.make_weights(), endless.PLACES[place], ids, [list(range(n + 1)) for n in range(len(ids))]
        )
        np.testing.assert_allclose(got[row], alone[-1], atol=2e-5)


def test_beside_other_queries_and_in_other_steps_nothing_changes(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner("rope")
    window = window_of(Options(endless="sinks", n_discard=3, window=SIZE), runner)
    assert window is not None
    alone = say(window, runner, runner.new_sequence(), TEXT, 1)
    sequence, plain = runner.new_sequence(), runner.new_sequence()
    for at, token in enumerate(TEXT[:70]):
        window.make_room(runner, sequence, lambda at=at: TEXT[:at])
        logits = runner.step([(plain, [token]), (sequence, [token])]).logits
        np.testing.assert_array_equal(logits[1], alone[at])
    assert plain.hole == (0, 0)


@pytest.mark.parametrize("mode", ["sinks", "shift"])
def test_a_fork_slides_on_its_own(make_runner: Callable[..., Runner], mode: str) -> None:
    runner = make_runner("rope")
    window = window_of(Options(endless=mode, n_discard=3, window=SIZE), runner)
    assert window is not None
    sequence = runner.new_sequence()
    whole = say(window, runner, sequence, TEXT, 5)
    runner.release(sequence)
    say(window, runner, sequence, TEXT[:60], 5)
    twin = runner.pool.fork(sequence)
    for each in (twin, sequence):  # the one that slides first must leave the other one's pages as they are
        logits = []
        for at in range(60, 100):
            window.make_room(runner, each, lambda at=at: TEXT[:at])
            logits.append(runner.step([(each, [TEXT[at]])]).logits[0])
            runner.pool.check([sequence, twin])
        np.testing.assert_array_equal(np.stack(logits), whole[60:100])
    runner.release(twin)
    runner.release(sequence)
    runner.pool.check([])


def test_a_window_that_finds_no_page_moves_nothing(make_runner: Callable[..., Runner]) -> None:
    runner = make_runner("rope", pages=6)
    window = window_of(Options(endless="sinks", window=SIZE), runner)
    assert window is not None
    whole = say(window, runner, runner.new_sequence(), TEXT[:60], 16)
    runner = make_runner("rope", pages=6)
    sequence, other = runner.new_sequence(), runner.new_sequence()
    say(window, runner, sequence, TEXT[:SIZE], 16)
    runner.prefill([(other, TEXT[:64])])
    with pytest.raises(RequestError, match="full"):
        window.make_room(runner, sequence, lambda: TEXT[:SIZE])
    assert (sequence.length, sequence.position, sequence.hole) == (SIZE, SIZE, (0, 0))
    runner.pool.check([sequence, other])
    runner.release(other)
    for at in range(SIZE, 60):
        window.make_room(runner, sequence, lambda at=at: TEXT[:at])
        np.testing.assert_array_equal(runner.step([(sequence, [TEXT[at]])]).logits[0], whole[at])


def test_layers_with_a_window_of_their_own_give_their_pages_back(make_runner: Callable[..., Runner]) -> None:
    """The NumPy step does not read the second group: only the tables are looked at here."""
    runner = make_runner("none", groups=(KvGroup((0,)), KvGroup((1,), 16)))
    tables = _tables_only(runner)
    window = window_of(Options(endless="sinks", n_discard=4, window=64), tables)
    assert window is not None
    sequence = tables.new_sequence()
    for at in range(250):
        window.make_room(tables, sequence, lambda: TEXT)
        tables.step([(sequence, [TEXT[at % len(TEXT)]])])
        tables.pool.check([sequence])
        held = sum(page >= 0 for page in sequence.tables[1])
        assert held <= 2 + 1
    assert len(sequence.pages) <= window.pages


def _tables_only(runner: Runner) -> Runner:
    """The same pool with a step that computes nothing."""

    def step(*arrays: NDArray[np.int32]) -> tuple[NDArray[np.float32], ...]:
        return tuple(np.zeros((len(arrays[-1]), 1), np.float32) for _ in range(4))

    return Runner(step, runner.pool, runner.vocab, runner.context, endless=runner.endless)


@pytest.mark.parametrize(
    ("place", "options", "fault"),
    [
        ("learned", {"endless": "sinks"}, "positions of this model's tokens allow: reevaluate"),
        ("alibi", {"endless": "shift"}, "allow: sinks, reevaluate"),
        ("rope", {"endless": "sinks", "window": 129}, "window: got 129, and the model's context is 128"),
        ("rope", {"endless": "sinks", "window": 16}, "wanted at least 21 to keep 4 and discard 16"),
        ("rope", {"endless": "sinks", "window": 16, "n_discard": 1}, "wanted at least 17"),
        ("rope", {"endless": "reevaluate", "window": 8, "n_discard": 4}, "wanted at least 9"),
    ],
)
def test_refusals_say_what_works(
    make_runner: Callable[..., Runner], place: str, options: dict[str, object], fault: str
) -> None:
    with pytest.raises(RequestError, match=fault):
        window_of(Options.of(options), make_runner(place))


def test_the_window_is_what_model_and_cache_allow(make_runner: Callable[..., Runner]) -> None:
    assert window_of(Options(), make_runner("rope")) is None
    window = window_of(Options(endless="sinks"), make_runner("rope"))
    assert window is not None
    assert window.size == 128
    window = window_of(Options(endless="sinks"), make_runner("rope", pages=4))
    assert window is not None
    assert window.pages == 4
    with pytest.raises(RequestError, match="the cache has room for one of 21"):
        window_of(Options(endless="sinks", window=22), make_runner("rope", pages=4))
