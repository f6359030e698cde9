"""Errors of the compile side: one line that says what, where, got, wanted, what to do."""

from __future__ import annotations


class LlmcError(Exception):
    """A refusal with a reason a user can act on."""


class SpecError(LlmcError):
    """A model specification that is incomplete, contradictory or out of bounds."""


class SourceError(LlmcError):
    """A model on disk that cannot be trusted or is not understood."""
