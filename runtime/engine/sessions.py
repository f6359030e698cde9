"""What an engine has read of a text, in a file, so that another engine of the same artifact need not read it."""

from __future__ import annotations

import os

from llmc.runtime.cache.session_file import Session, load_session, save_session
from llmc.runtime.decoding.options import Options
from llmc.runtime.engine.engine import Engine
from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import PAGE_TOKENS, Manifest


def save_prefix(
    engine: Engine, path: str | os.PathLike[str], ids: list[int], manifest: Manifest, salt: str = "", note: str = ""
) -> None:
    """Write the whole pages of `ids` to a file, with all of `ids` and a note; what no page is kept of is read first.

    Raises RequestError for an engine that keeps no prefixes, ids that leave no room in the context, and as
    `save_session`.
    """
    if engine.tree is None:
        raise RequestError("this engine keeps no prefixes, so it has no session to save")
    sequence = engine.tree.match([*ids, 0], salt)  # the last of what is matched is left out
    try:
        if sequence.length < len(ids) // PAGE_TOKENS * PAGE_TOKENS:
            query = engine.add_query(ids, Options(max_tokens=1, ignore_eos=True), salt=salt)
            for _ in engine.stream(query):
                pass
            engine.runner.release(sequence)
            sequence = engine.tree.match([*ids, 0], salt)
        save_session(path, engine.runner.pool, sequence, ids, manifest, note)
    finally:
        engine.runner.release(sequence)


def load_prefix(
    engine: Engine, path: str | os.PathLike[str], manifest: Manifest, salt: str = ""
) -> tuple[list[int], str]:
    """Keep the pages of a session for queries of `salt` that begin as it does; its ids and its note.

    Raises RequestError for an engine that keeps no prefixes or a text that has slid, and as `load_session`.
    """
    if engine.tree is None:
        raise RequestError("this engine keeps no prefixes, so it can load no session")
    session = load_session(path, engine.runner.pool, manifest)
    try:
        if _has_slid(session):
            raise RequestError(f"{path}: the session of a text that has slid; only a runner can go on with it")
        engine.tree.insert(session.sequence, session.ids, salt)
    finally:
        engine.runner.release(session.sequence)
    return session.ids, session.note


def _has_slid(session: Session) -> bool:
    return session.sequence.hole != (0, 0) or session.sequence.position != session.sequence.length
