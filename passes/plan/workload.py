"""What a model is asked to do while it is planned for."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.compiler.errors import LlmcError


@dataclass(frozen=True)
class Workload:
    """`queries` at once, each of a prompt of `prompt_tokens` and an answer of `new_tokens`.

    A prompt is read in chunks of at most `chunk` tokens. `micro_batches`: into how many groups the queries are divided
    that stages work on in turn; None: as many as there are stages, 1: stages wait for one another.
    Raises LlmcError naming a number that is not positive.
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    queries: int = 8
    chunk: int = 512
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        bad = [f"{name} {value}" for name, value in vars(self).items() if value is not None and value < 1]
        if bad:
            raise LlmcError(f"workload: {', '.join(bad)}; wanted at least 1")

    @property
    def tokens(self) -> int:
        """Of a query in the cache at its end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def context(self) -> float:
        """Tokens that a new one looks back on, on average over the answer."""
        return self.prompt_tokens + (self.new_tokens + 1) / 2
