"""What the server says: completions, chunks of them, and embeddings, in OpenAI's form.

Objects: https://platform.openai.com/docs/api-reference/chat/object, .../chat/streaming, .../completions/object.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.decoding.chooser import Choice
from llmc.runtime.generate import Generation
from llmc.runtime.model import Model
from llmc.runtime.serving.requests import Asked

Json = dict[str, Any]

_REASONS = {"context": "length"}  # what OpenAI calls it otherwise


class Answer:
    """Builds the objects that answer one request.

    The answers of prompt p are choices p * n to p * n + n - 1.
    """

    def __init__(self, model: Model, name: str, asked: Asked) -> None:
        self._model, self._asked = model, asked
        kind = "chat.completion" if asked.chat else "text_completion"
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        self._whole_kind, self._chunk_kind = kind, kind + ".chunk" if asked.chat else kind

    def whole(self, generations: Sequence[Generation]) -> Json:
        """All answers at once; a generation for each prompt."""
        choices = [
            self._choice(self._index(prompt, number), one, self._echoed(prompt))
            for prompt, generation in enumerate(generations)
            for number, one in enumerate([generation, *generation.others])
        ]
        return {**self._head, "object": self._whole_kind, "choices": choices, "usage": usage_of(generations)}

    def opening(self) -> Iterable[Json]:
        """What a stream begins with: of a conversation who speaks, of texts those that are echoed."""
        for prompt in range(len(self._asked.prompts)):
            for number in range(self._asked.options.n):
                index = self._index(prompt, number)
                if self._asked.chat:
                    yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""},
                                       "logprobs": None, "finish_reason": None})  # fmt: skip
                elif self._asked.echo:
                    yield self.piece(prompt, number, self._echoed(prompt), [])

    def piece(self, prompt: int, number: int, text: str, choices: Sequence[Choice]) -> Json:
        """Some more text of an answer, and of its tokens what was asked for."""
        return self._chunk(self._part(self._index(prompt, number), text, choices or None, None))

    def closing(self, prompt: int, generation: Generation) -> Iterable[Json]:
        """Why each answer of a prompt ended."""
        for number, one in enumerate([generation, *generation.others]):
            yield self._chunk(self._part(self._index(prompt, number), "", None, _reason(one)))

    def counts(self, generations: Iterable[Generation]) -> Json:
        """The chunk with the counts of tokens."""
        return {**self._chunk(None), "usage": usage_of(generations)}

    def _index(self, prompt: int, number: int) -> int:
        return prompt * self._asked.options.n + number

    def _echoed(self, prompt: int) -> str:
        if not self._asked.echo:
            return ""
        text = self._asked.prompts[prompt]
        return text if isinstance(text, str) else self._model.decode(text)

    def _chunk(self, choice: Json | None) -> Json:
        return {**self._head, "object": self._chunk_kind, "choices": [] if choice is None else [choice]}

    def _choice(self, index: int, one: Generation, echoed: str) -> Json:
        if not self._asked.chat:
            return self._part(index, echoed + one.text, one.logprobs, _reason(one))
        message = {"role": "assistant", "content": one.text, "refusal": None}
        logprobs = self._logprobs(one.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _reason(one)}

    def _part(self, index: int, text: str, choices: Sequence[Choice] | None, reason: str | None) -> Json:
        logprobs = self._logprobs(choices)
        if not self._asked.chat:
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        delta = {"content": text} if text or choices else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, choices: Sequence[Choice] | None) -> Json | None:
        if choices is None or self._asked.options.logprobs is None:
            return None
        if self._asked.chat:
            return {"content": [self._told(choice) for choice in choices], "refusal": None}
        tokens = [self._text(choice.token) for choice in choices]
        starts = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
        tops = [{self._text(token): logprob for token, logprob in choice.top} for choice in choices]
        return {"tokens": tokens, "token_logprobs": [choice.logprob for choice in choices], "top_logprobs": tops,
                "text_offset": starts}  # fmt: skip

    def _told(self, choice: Choice) -> Json:
        top = [self._token(token, logprob) for token, logprob in choice.top]
        return {**self._token(choice.token, choice.logprob), "top_logprobs": top}

    def _token(self, id_: int, logprob: float) -> Json:
        text = self._text(id_)
        whole = "\ufffd" not in text  # a part of a character has no text of its own
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    def _text(self, id_: int) -> str:
        return self._model.decode([id_], special=True)


def usage_of(generations: Iterable[Generation]) -> Json:
    """Counts of tokens: of prompts, of those the ones that did not have to be read again, of answers, of guesses."""
    prompt = cached = made = drafted = accepted = 0
    for generation in generations:
        prompt += len(generation.prompt_ids)
        cached += max(0, len(generation.prompt_ids) - int(generation.timings["prefill_tokens"]))
        for one in (generation, *generation.others):
            made += len(one.ids)
            drafted += int(one.timings["drafted_tokens"])
            accepted += int(one.timings["accepted_tokens"])
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"accepted_prediction_tokens": accepted,
                                          "rejected_prediction_tokens": drafted - accepted}}  # fmt: skip


def embeddings(name: str, vectors: NDArray[np.float32], tokens: int, as_base64: bool) -> Json:
    """The vectors (n, C) of n texts, which had so many tokens together."""
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if as_base64 else vector.tolist()}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def _packed(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _reason(one: Generation) -> str:
    return _REASONS.get(one.finish_reason, one.finish_reason)
