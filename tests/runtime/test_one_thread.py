"""Which thread runs what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from llmc.runtime.loading.one_thread import OneThread


def elsewhere(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_the_first_thread_calls_by_itself_and_all_others_through_one() -> None:
    thread, found = OneThread(), list[int]()

    def call() -> None:
        found.append(thread.run(threading.get_ident))

    call()
    for _ in range(3):
        elsewhere(call)
    call()
    assert found[0] == found[4] == threading.get_ident()
    assert len(set(found[1:4])) == 1
    assert found[1] != found[0]


def test_when_the_first_thread_is_gone_there_is_still_one() -> None:
    thread, found = OneThread(), list[int]()
    elsewhere(lambda: thread.run(threading.get_ident))
    for _ in range(4):
        elsewhere(lambda: found.append(thread.run(threading.get_ident)))
    assert len(set(found)) == 1


def test_errors_come_back_to_who_called() -> None:
    thread = OneThread()
    elsewhere(lambda: thread.run(int))
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 // 0)


def test_an_interrupt_waits_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import concurrent.futures

    thread, ended = OneThread(), list[bool]()
    elsewhere(lambda: thread.run(int))

    def interrupted(self: object, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    def call() -> None:
        time.sleep(0.2)
        ended.append(True)

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(call)
    assert ended == [True]
