"""The page at `/`: a conversation with the model in a browser, without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_PAGE = Path(__file__).with_name("page.html").read_bytes()
_SCRIPT = _PAGE.partition(b"<script>")[2].partition(b"</script>")[0]
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT).digest()).decode()
# Its own script and no other may run, and it may ask this server alone: what a model writes is text and no more.
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def page(request: Request) -> Response:
    """The page. It holds nothing of the model, so it is open to all; what it asks for wants the key as ever."""
    return Response(_PAGE, headers=_HEADERS, media_type="text/html; charset=utf-8")
