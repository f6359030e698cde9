"""Sessions of an engine: what one has read, another goes on with as if it had read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.runtime.cache.session_file import save_session
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.engine import Engine
from llmc.runtime.engine.sessions import load_prefix, save_prefix
from llmc.runtime.errors import CacheFull, RequestError
from llmc.runtime.loading.manifest import Manifest, read_manifest
from llmc.runtime.runner import Runner
from llmc.runtime.text.tokenizer import Tokenizer

MakeEngine = Callable[..., Engine]
IDS = [(7 * n) % 97 for n in range(50)]  # three whole pages and two tokens
OPTIONS = Options(max_tokens=8, ignore_eos=True)


@pytest.fixture
def manifest(fake_artifact: Path) -> Manifest:
    return read_manifest(fake_artifact)


@pytest.fixture
def make_engine(make_runner: Callable[..., Runner], make_tokenizer_json: Callable[..., bytes]) -> MakeEngine:
    tokenizer = Tokenizer(make_tokenizer_json())
    return lambda pages=32, **wishes: Engine(make_runner(pages=pages), tokenizer, **wishes)


def answer(engine: Engine, ids: list[int], salt: str = "") -> list[int]:
    (last,) = [r.done for r in engine.follow([engine.add_query(ids, OPTIONS, salt=salt)]) if r.done is not None]
    return last.ids


@pytest.mark.parametrize("asked_before", [True, False])
def test_another_engine_goes_on_without_reading_again(
    make_engine: MakeEngine, manifest: Manifest, tmp_path: Path, asked_before: bool
) -> None:
    here, there = make_engine(), make_engine()
    if asked_before:
        answer(here, IDS)
    rows = here.stats.rows
    save_prefix(here, tmp_path / "a", IDS, manifest, note="n")
    assert here.stats.rows == (rows if asked_before else 50)
    assert load_prefix(there, tmp_path / "a", manifest) == (IDS, "n")
    assert answer(there, IDS) == answer(here, IDS)
    assert there.stats.hit_tokens == 48
    for engine in (here, there):
        engine.forget_prefixes()
        engine.runner.pool.check([])


def test_a_session_is_for_its_salt(make_engine: MakeEngine, manifest: Manifest, tmp_path: Path) -> None:
    here, there = make_engine(), make_engine()
    answer(here, IDS, salt="Ada")
    save_prefix(here, tmp_path / "a", IDS, manifest, salt="Ada")
    load_prefix(there, tmp_path / "a", manifest, salt="Bob")
    answer(there, IDS)
    assert there.stats.hit_tokens == 0
    answer(there, IDS, salt="Bob")
    assert there.stats.hit_tokens == 48


def test_a_short_text_has_no_pages_but_its_tokens(make_engine: MakeEngine, manifest: Manifest, tmp_path: Path) -> None:
    engine = make_engine()
    save_prefix(engine, tmp_path / "a", IDS[:5], manifest)
    assert engine.stats.rows == 0
    assert load_prefix(engine, tmp_path / "a", manifest) == (IDS[:5], "")


def test_what_an_engine_cannot_keep_is_said(make_engine: MakeEngine, manifest: Manifest, tmp_path: Path) -> None:
    engine, forgetful = make_engine(), make_engine(keep_prefixes=False)
    with pytest.raises(RequestError, match="keeps no prefixes"):
        save_prefix(forgetful, tmp_path / "a", IDS, manifest)
    with pytest.raises(RequestError, match="keeps no prefixes"):
        load_prefix(forgetful, tmp_path / "a", manifest)
    sequence = engine.runner.new_sequence()
    engine.runner.step([(sequence, IDS)])
    sequence.hole = (4, 16)
    save_session(tmp_path / "a", engine.runner.pool, sequence, IDS, manifest)
    engine.runner.release(sequence)
    with pytest.raises(RequestError, match="has slid"):
        load_prefix(engine, tmp_path / "a", manifest)
    save_prefix(engine, tmp_path / "b", IDS, manifest)
    small = make_engine(pages=2)
    with pytest.raises(CacheFull):
        load_prefix(small, tmp_path / "b", manifest)
    for each in (engine, forgetful, small):
        each.forget_prefixes()
        each.runner.pool.check([])
