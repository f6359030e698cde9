"""What goes wrong with a request, as OpenAI's clients know it: a status, and a JSON object that says what to do."""

from __future__ import annotations

import logging
import os
from typing import Any

from llmc.runtime.errors import LlmcError, RequestError

_LOG = logging.getLogger("llmc.serving")


class Refused(Exception):
    """A request that is not served: its HTTP status, the line that says why, and a code for programs.

    headers: that go with the answer. param: the field of the request that is at fault.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}


def refusal(error: Exception) -> Refused:
    """The refusal that an error of the runtime amounts to; of any other, one that tells the client nothing of it."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestError):
        return Refused(400, str(error))
    if isinstance(error, LlmcError):
        return Refused(500, str(error))
    return Refused(500, "internal error; the server's log says which")


def body_of(refused: Refused) -> dict[str, Any]:
    """The error object: https://platform.openai.com/docs/guides/error-codes."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def log(where: str, error: Exception) -> None:
    """Tell who runs the server of an error that its clients are told nothing of."""
    if not isinstance(error, (Refused, LlmcError)):
        traceback = os.environ.get("LLMC_DEBUG", "0") not in ("", "0")
        _LOG.error("%s: %s: %s", where, type(error).__name__, error, exc_info=error if traceback else None)
