"""The server's page in a real browser: a conversation, keys, errors, and text that would like to be more than text."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from page_driver import Page, browser
from server_process import KEY, Server, serving

import llmc

ENTER = "\ue007"
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.model
with_browser = pytest.mark.skipif(DRIVER is None, reason="no chromedriver here")


@pytest.fixture(scope="module")
def server(smollm2_artifact: Callable[..., Path]) -> Iterator[Server]:
    with serving(smollm2_artifact("q8"), "--model-name", "small", "--threads", "1") as running:
        yield running


@pytest.fixture
def page(server: Server, tmp_path: Path) -> Iterator[Page]:
    assert DRIVER is not None
    with browser(DRIVER, tmp_path / "profile") as opened:
        opened.open(server.address)
        opened.run("document.querySelector('details').open = true")
        yield opened


def test_it_may_run_its_own_script_and_no_other(server: Server) -> None:
    with urllib.request.urlopen(server.address) as reply:
        html, policy = reply.read().decode(), reply.headers["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"https?://|src=|href=|innerHTML|\bon\w+=", html)


@with_browser
def test_a_conversation(page: Page, smollm2_artifact: Callable[..., Path]) -> None:
    page.type("#key", KEY)
    _set(page, temperature="0", most="40")
    assert _said(page, "List the months of the year.") == _own(smollm2_artifact, "List the months of the year.")
    assert page.wait("document.title") == "small"
    assert re.search(r"\d+ tokens, [\d.]+ a second", page.text())
    again = _said(page, "How many are there?", answers=2)
    assert again == _own(smollm2_artifact, "List the months of the year.", "How many are there?")
    page.click("#anew")
    assert page.run("return document.querySelectorAll('.turn').length") == 0
    assert _said(page, "List the months of the year.") == _own(smollm2_artifact, "List the months of the year.")


@with_browser
def test_what_goes_wrong_is_said_and_may_be_mended(page: Page) -> None:
    page.type("#text", "Hello" + ENTER)
    assert "a key is wanted" in page.wait("document.querySelector('.bad')?.textContent")
    assert page.run("return document.getElementById('text').value") == "Hello"
    page.type("#key", KEY)
    _set(page, most="99999")
    page.type("#text", ENTER)
    assert "at most 8192" in page.wait("[...document.querySelectorAll('.bad')][1]?.textContent")
    _set(page, most="5")
    page.type("#text", ENTER)
    page.wait("document.querySelector('.told')")


@with_browser
def test_an_answer_is_stopped(page: Page, server: Server) -> None:
    page.type("#key", KEY)
    page.type("#text", "Tell me a very long story, as long as you can." + ENTER)
    page.wait("document.querySelectorAll('.turn')[1]?.textContent.length > 20")
    page.click("#send")
    page.wait("document.getElementById('send').textContent === 'Send'")
    assert server.settles("llmc_engine_running", 0)


@with_browser
def test_text_stays_text(page: Page) -> None:
    page.type("#key", KEY)
    _set(page, most="3")
    page.type("#text", "<img src=x onerror=\"document.title='taken'\"><b>bold</b>" + ENTER)
    page.wait("document.querySelector('.told')")
    assert page.run("return document.querySelectorAll('main img, main b').length") == 0
    assert "<b>bold</b>" in page.text()
    assert page.run("return document.title") == "small"


def _set(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)


def _said(page: Page, question: str, answers: int = 1) -> str:
    """The answer to a question, the so-manieth of the conversation."""
    page.type("#text", question + ENTER)
    page.wait(f"document.querySelectorAll('.told').length === {answers}")
    return str(page.run("return [...document.querySelectorAll('.turn')].at(-1).textContent"))


def _own(smollm2_artifact: Callable[..., Path], *questions: str) -> str:
    """What the model answers to the last of some questions."""
    messages: list[dict[str, Any]] = []
    with llmc.load(smollm2_artifact("q8"), threads=1) as model:
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": model.chat(messages, max_tokens=40).text})
    return str(messages[-1]["content"])
