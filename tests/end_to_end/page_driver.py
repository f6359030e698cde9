"""A headless Chromium that is told what to do over WebDriver: https://www.w3.org/TR/webdriver2."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=900,700",
]  # fmt: skip


class Page:
    """A window of the browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, address: str) -> None:
        """Go there, and wait until it is loaded."""
        _told(f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """What JavaScript, the body of a function, returns."""
        return _told(f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def type(self, selector: str, text: str) -> None:
        """Press keys in an element; "\\ue007" is Enter."""
        (element,) = _told(f"{self._session}/element", {"using": "css selector", "value": selector}).values()
        _told(f"{self._session}/element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Click an element."""
        (element,) = _told(f"{self._session}/element", {"using": "css selector", "value": selector}).values()
        _told(f"{self._session}/element/{element}/click", {})

    def wait(self, script: str, seconds: float = 30) -> Any:
        """The first value of an expression that is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < end, f"{script} did not come true; the page says: {self.text()}"
            time.sleep(0.05)
        return value

    def text(self) -> str:
        """What a reader sees."""
        return str(self.run("return document.body.innerText"))

    def picture(self) -> str:
        """A PNG of the window, in base64."""
        with urllib.request.urlopen(f"{self._session}/screenshot") as reply:
            return str(json.load(reply)["value"])


@contextmanager
def browser(driver: str, profile: Path) -> Iterator[Page]:
    """A window, closed in the end. `driver`: the program chromedriver."""
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"successfully on port (\d+)", line) for line in process.stdout)))
            root = f"http://127.0.0.1:{found[1]}/session"
            options = {"args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
            made = _told(root, {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
            session = f"{root}/{made['sessionId']}"
            yield Page(session)
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE")).close()
        finally:
            process.terminate()


def _told(address: str, body: Any) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["value"]
