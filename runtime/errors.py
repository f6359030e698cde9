"""What the runtime raises for anything a caller can cause: one line that says what, where, got, wanted, what to do."""

from __future__ import annotations


class LlmcError(Exception):
    """Base of every error this package raises on purpose; its text is one line."""


class ArtifactError(LlmcError):
    """The artifact is damaged, incomplete, too new, or made for another machine."""


class RequestError(LlmcError):
    """The request cannot be served: bad prompt, bad parameter, or no room for it."""


class CacheFull(RequestError):
    """Too few pages of the KV cache are free."""


class WorkerLost(LlmcError):
    """A process that runs a part of the model has ended."""
