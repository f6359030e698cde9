"""Sessions in files: what is loaded goes on as if it had never been away, and what is not whole is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmc.runtime.cache.ledger import NO_PAGE
from llmc.runtime.cache.pages import PagePool, Sequence
from llmc.runtime.cache.session_file import _digest, load_session, save_session
from llmc.runtime.errors import ArtifactError, CacheFull, LlmcError, RequestError
from llmc.runtime.loading.manifest import KvGroup, KvLayout, Manifest, read_manifest
from llmc.runtime.runner import Runner

MakeRunner = Callable[..., Runner]
GROUPS = (KvGroup((0, 2)), KvGroup((1,), 24))


@pytest.fixture
def manifest(fake_artifact: Path) -> Manifest:
    return read_manifest(fake_artifact)


@pytest.fixture
def windowed() -> tuple[PagePool, Sequence]:
    """A pool of three layers, one of them with a window, and a sequence of 70 slots with numbers in its pages."""
    pool = PagePool(KvLayout(3, 2, 8, "bf16", GROUPS), 160)
    first, sequence = pool.new_sequence(), pool.new_sequence()
    pool.reserve_all([(first, 20), (sequence, 70)])
    random = np.random.default_rng(0)
    for layer in pool.layers:
        layer[:] = random.integers(0, 2**16, layer.shape)
    sequence.length = sequence.position = 70
    pool.release(first)
    return pool, sequence


def prompt(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(length).integers(0, 97, length)]


def edited(path: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    """Change tensors and metadata of a session, and state the hash that they have then."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        about = dict(file.metadata())
    tensors = dict(load_file(path))
    change(tensors, about)
    about["sha256"] = _digest({key: value for key, value in about.items() if key != "sha256"}, tensors)
    save_file(tensors, path, about)


def refused(path: Path, pool: PagePool, manifest: Manifest, error: type[LlmcError] = ArtifactError) -> str:
    """The one line of the refusal, which leaves the pool as it was."""
    before = [ledger.free for ledger in pool.ledgers]
    with pytest.raises(error) as caught:
        load_session(path, pool, manifest)
    assert [ledger.free for ledger in pool.ledgers] == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 16, 50])
def test_a_loaded_session_goes_on_with_equal_bits(
    make_runner: MakeRunner, manifest: Manifest, tmp_path: Path, length: int
) -> None:
    here, there = make_runner(), make_runner()
    ids = prompt(length)
    sequence = here.new_sequence()
    here.step([(sequence, ids)])
    save_session(tmp_path / "a.session", here.pool, sequence, ids, manifest)
    there.step([(there.new_sequence(), [1] * 20)])  # so that its pages are others
    session = load_session(tmp_path / "a.session", there.pool, manifest)
    assert session.ids == ids
    for token in (5, 90, 3):
        wanted, got = here.step([(sequence, [token])]), there.step([(session.sequence, [token])])
        assert (wanted.logits == got.logits).all()
    there.release(session.sequence)


def test_every_page_a_row_can_see_comes_back(
    windowed: tuple[PagePool, Sequence], manifest: Manifest, tmp_path: Path
) -> None:
    pool, sequence = windowed
    sequence.position, sequence.hole = 99, (4, 32)
    save_session(tmp_path / "a", pool, sequence, [*prompt(70), 7, 8], manifest, note="ein Zettel\n")
    other = PagePool(KvLayout(3, 2, 8, "bf16", GROUPS), 320)
    session = load_session(tmp_path / "a", other, manifest)
    twin = session.sequence
    assert (session.ids, session.note) == ([*prompt(70), 7, 8], "ein Zettel\n")
    assert (twin.length, twin.position, twin.hole) == (70, 99, (4, 32))
    assert [page != NO_PAGE for page in twin.tables[1]] == [False, False, True, True, True]
    for group, table, own in zip(pool.groups, sequence.tables, twin.tables, strict=True):
        for layer in group.layers:
            for page, copy in zip(table, own, strict=True):
                assert copy == NO_PAGE or (pool.layers[layer][page] == other.layers[layer][copy]).all()
    other.check([twin])


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_every_kind_of_page_is_kept_as_it_is(manifest: Manifest, tmp_path: Path, dtype: str) -> None:
    pool = PagePool(KvLayout(2, 3, 40, dtype), 64)
    sequence = pool.new_sequence()
    pool.reserve_all([(sequence, 33)])
    for layer in pool.layers:
        layer.view(np.uint8)[:] = np.random.default_rng(1).integers(0, 256, layer.view(np.uint8).shape)
    sequence.length = sequence.position = 33
    save_session(tmp_path / "a", pool, sequence, prompt(33), manifest)
    twin = load_session(tmp_path / "a", other := PagePool(KvLayout(2, 3, 40, dtype), 64), manifest).sequence
    for ours, theirs in zip(pool.layers, other.layers, strict=True):
        assert ours[sequence.pages].tobytes() == theirs[twin.pages].tobytes()


def test_a_file_is_replaced_whole_and_only_its_user_reads_it(
    windowed: tuple[PagePool, Sequence], manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    save_session(path, *windowed, prompt(70), manifest)
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RequestError, match="No space left"):
        save_session(path, *windowed, prompt(71), manifest)
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a", "tiny.llmc"]  # nothing is left aside


def test_any_changed_byte_is_found(windowed: tuple[PagePool, Sequence], manifest: Manifest, tmp_path: Path) -> None:
    pool, sequence = windowed
    path = tmp_path / "a"
    save_session(path, pool, sequence, prompt(70), manifest, note="n")
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in [*range(header), *range(header, len(data), 101), len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        if data[at : at + 1].isspace() and at < header:
            continue  # the filling at the header's end says nothing
        refused(path, pool, manifest)
    for size in (0, 7, 8, header - 1, header, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        refused(path, pool, manifest)
    path.write_bytes(data + b"\0")
    refused(path, pool, manifest)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors, about: about.update(format="2"), "format '2'"),
        (lambda tensors, about: about.update(artifact="0" * 64, model="Other"), "another artifact, 'Other'"),
        (lambda tensors, about: about.update(slots="71"), "70 for 71 slots"),
        (lambda tensors, about: about.update(slots="90"), "5 blocks for 90 slots"),
        (lambda tensors, about: about.update(slots="-1"), "slots, position and hole"),
        (lambda tensors, about: about.update(position="99999999999"), "slots, position and hole"),
        (lambda tensors, about: about.update(hole_first="33", hole_after="32"), "slots, position and hole"),
        (lambda tensors, about: about.update(extra="1"), "unknown key 'extra'"),
        (lambda tensors, about: about.pop("note"), "missing key 'note'"),
        (lambda tensors, about: about.pop("format"), "no session"),
        (lambda tensors, about: tensors["tokens"].__setitem__(3, 97), "below 97"),
        (lambda tensors, about: tensors["tokens"].__setitem__(3, -1), "below 97"),
        (lambda tensors, about: tensors.update(tokens=tensors["tokens"].astype(np.int64)), "int64, wanted int32"),
        (lambda tensors, about: tensors.update(tokens=tensors["tokens"].reshape(2, 35)), "shape [2, 35]"),
        (lambda tensors, about: tensors.pop("kv.2"), "tensors are not those"),
        (lambda tensors, about: tensors.update(more=np.zeros(1)), "tensors are not those"),
        (lambda tensors, about: tensors.update({"kv.1": tensors["kv.1"][:-1]}), "kv.1: got shape"),
        (lambda tensors, about: tensors.update({"kv.1": tensors["kv.1"].view(np.int16)}), "dtype"),
        (lambda tensors, about: tensors["held.1"].__setitem__(slice(0, 5), [1, 1, 0, 0, 1]), "missing"),
    ],
)
def test_a_session_that_does_not_fit_is_refused_by_name(
    windowed: tuple[PagePool, Sequence],
    manifest: Manifest,
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, str]], None],
    reason: str,
) -> None:
    pool, sequence = windowed
    save_session(tmp_path / "a", pool, sequence, prompt(70), manifest)
    edited(tmp_path / "a", change)
    assert reason in refused(tmp_path / "a", pool, manifest)


def test_a_session_is_for_one_artifact(windowed: tuple[PagePool, Sequence], manifest: Manifest, tmp_path: Path) -> None:
    save_session(tmp_path / "a", *windowed, prompt(70), replace(manifest, sha256="ab" * 32))
    assert "'tiny' (abababababab...); this is 'tiny'" in refused(tmp_path / "a", windowed[0], manifest)


def test_a_session_needs_room(windowed: tuple[PagePool, Sequence], manifest: Manifest, tmp_path: Path) -> None:
    save_session(tmp_path / "a", *windowed, prompt(70), manifest)
    small = PagePool(KvLayout(3, 2, 8, "bf16", GROUPS), 96)
    taken = small.new_sequence()
    small.reserve_all([(taken, 32)])
    assert "KV cache is full" in refused(tmp_path / "a", small, manifest, CacheFull)
    small.release(taken)
    load_session(tmp_path / "a", small, manifest)


def test_paths_that_are_no_session(windowed: tuple[PagePool, Sequence], manifest: Manifest, tmp_path: Path) -> None:
    pool, sequence = windowed
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("a text")
    save_file({"x": np.zeros(3)}, tmp_path / "weights")
    for name, reason in (
        ("nothing", "No such file"), ("pipe", "not a plain file"), ("text", "no session"), ("weights", "no session"),
        (".", "not a plain file"),
    ):  # fmt: skip
        assert reason in refused(tmp_path / name, pool, manifest)
    with pytest.raises(RequestError, match="No such file"):
        save_session(tmp_path / "no" / "a", pool, sequence, prompt(70), manifest)


def test_what_cannot_be_saved_is_said(windowed: tuple[PagePool, Sequence], manifest: Manifest, tmp_path: Path) -> None:
    pool, sequence = windowed
    with pytest.raises(RequestError, match="69 tokens for 70 slots"):
        save_session(tmp_path / "a", pool, sequence, prompt(69), manifest)
    with pytest.raises(RequestError, match="source"):
        save_session(tmp_path / "a", pool, Sequence(sequence), [], manifest)
    assert not (tmp_path / "a").exists()
