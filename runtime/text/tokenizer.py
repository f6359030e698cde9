"""Text to token ids and back, and back piece by piece as the model speaks.

Ids become bytes and bytes become text, with one UTF-8 decoder that keeps a started character until it is complete. So
what is streamed is what `decode` gives, never a part of a character.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer as Backend

from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.text.control_tokens import ControlTokens

_MAX_PROMPT_CHARS = 64 << 20
_SHORT_TOKEN_CHARS = 3  # texts of at most this many characters a token are encoded without a second thought
_HELD_TOKENS = 8  # for decoders of unknown kind: tokens kept back at most while the text ends in U+FFFD
_HIDING = "\ufdd0"  # begins a token that no text becomes (frontends/tokenizers/pieces.py)
_UNHIDE = {"type": "Replace", "pattern": {"String": _HIDING}, "content": ""}
_WINDOW_TOKENS = 4  # for the same: tokens before the new ones that may change how those are written


class Tokenizer:
    """The tokenizer.json of an artifact. `bos` is put before a prompt when it is not None."""

    def __init__(self, tokenizer_json: bytes, bos: int | None = None) -> None:
        try:
            self._backend = Backend.from_buffer(tokenizer_json)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._unknown = _unknown_rule(tokenizer_json, self._backend)
            decoder = _decoder(self._backend)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # tokenizers raises plain Exception, and panics are not even that
            reason = str(error).replace("\n", " ")[:200]
            raise ArtifactError(f"tokenizer.json cannot be read: {reason}") from error
        self._bos = bos
        self._control = ControlTokens(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._to_bytes, self._drops_space = _bytes_rule(decoder)
        self._cache: dict[int, bytes] = {}
        self._longest: int | None = None  # characters of the longest token

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text, such as the end of a message."""
        return self._special

    @property
    def has_bytes(self) -> bool:
        """Whether each token stands for bytes of its own (`token_bytes`), whatever stands beside it."""
        return self._to_bytes is not None

    def same_ids_as(self, other: Tokenizer) -> bool:
        """Whether every id stands for the same token in both."""
        mine: object = self._backend.get_vocab()
        return mine == other._backend.get_vocab()

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of `text`, after the model's first token where it wants one and `bos` is true."""
        _check_text(text)
        ids = self._as_known(_unless_it_panics(lambda: self._backend.encode(text, add_special_tokens=False).ids))
        return [self._bos, *ids] if bos and self._bos is not None else ids

    def token(self, token_id: int) -> str:
        """How the vocabulary spells an id."""
        return str(self._backend.id_to_token(token_id))

    def id_of(self, token: str) -> int | None:
        """The id of an entry of the vocabulary, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def mark(self, content: str) -> str:
        """What to give a chat template for the text of a message, so that `encode_chat` can tell the two apart."""
        return self._control.mark(content)

    def encode_chat(self, marked: str, limit: int) -> list[int]:
        """Token ids of a rendered chat template whose contents went through `mark`; at most `limit` (`check_length`).

        Without control tokens in the contents these are the ids of the whole text. A control token that a message
        spells is encoded as the text it is.
        """
        plain, guarded = self._control.read(marked)
        self.check_length(plain, limit)
        if guarded is None:
            return self.encode(plain, bos=False)
        _check_text(plain)
        return self._as_known(_unless_it_panics(lambda: self._control.encode(guarded)))

    def _as_known(self, ids: list[int]) -> list[int]:
        """The ids with the unknown token's in place of those that the model does not have."""
        if self._unknown is None:
            return ids
        first, unknown = self._unknown
        return [id_ if id_ < first else unknown for id_ in ids]

    def check_length(self, text: str, limit: int) -> None:
        """Raise RequestError when `text` must have more than `limit` tokens; encoding it would take long to say so."""
        if not isinstance(text, str) or len(text) <= limit * _SHORT_TOKEN_CHARS:
            return
        if self._longest is None:
            self._longest = max(map(len, self._backend.get_vocab()), default=1)
        if len(text) > limit * self._longest:
            raise RequestError(f"prompt: {len(text)} characters cannot fit in a context of {limit} tokens")

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD. `special` writes special tokens too."""
        stream = self.stream(special)
        return "".join([stream.push(i) for i in ids]) + stream.finish()

    def stream(self, special: bool = False) -> TextStream:
        """A decoder that is given ids one by one."""
        if self._to_bytes is None:
            return _WindowStream(self._backend, special)
        return _ByteStream(self, special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; none for an id without a token."""
        known = self._cache.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            assert self._to_bytes is not None
            known = b"" if token is None else self._to_bytes(token)
            self._cache[token_id] = known
        return known


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"prompt: got {type(text).__name__}, wanted text")
    if len(text) > _MAX_PROMPT_CHARS:
        raise RequestError(f"prompt: {len(text)} characters, and at most {_MAX_PROMPT_CHARS} are read")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"prompt: not valid Unicode at character {error.start} (a lone surrogate)") from error


def _unless_it_panics(encode: Callable[[], list[int]]) -> list[int]:
    """What `encode` gives. Raises RequestError where the library gives up, as on a text its pattern cannot match."""
    try:
        return encode()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not of class Exception
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"prompt: the model's tokenizer cannot split this text: {reason}") from None


class TextStream:
    """Turns token ids into pieces of text; the pieces joined are what `Tokenizer.decode` gives."""

    def push(self, token_id: int) -> str:
        """The text that is certain after one more token; empty while a character is incomplete."""
        raise NotImplementedError

    def finish(self) -> str:
        """What was still held: an incomplete character is U+FFFD."""
        raise NotImplementedError


class _ByteStream(TextStream):
    """For tokenizers whose tokens are bytes: byte-level BPE, and SentencePiece with byte fallback."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset() if special else tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer._drops_space

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream(TextStream):
    """For any other tokenizer: decodes the last few tokens together, and gives what they add."""

    def __init__(self, backend: Backend, special: bool) -> None:
        self._backend = backend
        self._skip_special = not special
        self._before: list[int] = []  # tokens already given as text, kept for how the next ones join them
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._added()
        if text.endswith("\ufffd") and len(self._held) < _HELD_TOKENS:
            return ""
        self._before = (self._before + self._held)[-_WINDOW_TOKENS:]
        self._held = []
        return text

    def finish(self) -> str:
        text = self._added() if self._held else ""
        self._held = []
        return text

    def _added(self) -> str:
        before = self._decode(self._before)
        together = self._decode(self._before + self._held)
        return together.removeprefix(before) if together.startswith(before) else self._decode(self._held)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skip_special)
        return text


def _unknown_rule(tokenizer_json: bytes, backend: Backend) -> tuple[int, int] | None:
    """(first id that is unknown to the model, the unknown token's), or None: what the compiler adds to tokenizer.json.

    Such ids are pieces that texts are cut into, and that the model was trained without.
    """
    if b'"unknown_from"' not in tokenizer_json:  # the library has read it all once; reading it again takes half as long
        return None
    model = json.loads(tokenizer_json)["model"]
    first = model.get("unknown_from")
    if first is None:
        return None
    unknown = model.get("unk_id")
    if unknown is None:
        unknown = backend.token_to_id(model["unk_token"])
    return int(first), int(unknown)


def _decoder(backend: Backend) -> Any:
    """The decoder as it stands in tokenizer.json."""
    return None if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _bytes_rule(decoder: Any) -> tuple[Callable[[str], bytes] | None, bool]:
    """How the tokens of a decoder (as in tokenizer.json) become bytes, and whether the text's first space is dropped.

    (None, False) for a decoder whose tokens do not have bytes of their own.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return _byte_level_bytes, False
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None, False
    strips = [step for step in steps if step["type"] == "Strip"]
    if any((s.get("content"), s.get("start"), s.get("stop")) != (" ", 1, 0) for s in strips):
        return None, False
    replaces = [step for step in steps if step["type"] == "Replace" and step != _UNHIDE]
    if any((s.get("pattern"), s.get("content")) != ({"String": "▁"}, " ") for s in replaces):
        return None, False
    spaces = [step for step in steps if step["type"] == "Metaspace"]
    if not replaces and not spaces or any(s.get("replacement", "▁") != "▁" for s in spaces):
        return None, False
    rule = _fallback_bytes if "ByteFallback" in kinds else _spaced_bytes
    return rule, bool(strips) or any(s.get("prepend_scheme", "always") != "never" for s in spaces)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _spaced_bytes(token: str) -> bytes:
    return token.replace(_HIDING, "").replace("▁", " ").encode()


def _fallback_bytes(token: str) -> bytes:
    """SentencePiece spells a byte that is in no token as <0xE2>."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return _spaced_bytes(token)


def _byte_level_bytes(token: str) -> bytes:
    """Byte-level BPE spells every byte as one printable character; a token with any other character is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """https://github.com/openai/gpt-2/blob/master/src/encoder.py bytes_to_unicode, the other way round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
