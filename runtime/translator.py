"""From which language into which: what stands around a source text, and what its translation begins with.

A model says it with a token of each language (https://arxiv.org/abs/2010.11125 section 2.1), with a sentence before the
text (https://arxiv.org/abs/1910.10683 section 2.4), or not at all, where it knows one pair of languages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llmc.runtime.errors import RequestError
from llmc.runtime.loading.manifest import Manifest
from llmc.runtime.text.tokenizer import Tokenizer

_LISTED = 12  # names an error lists before it counts the rest


@dataclass(frozen=True)
class Direction:
    """What one call translates: `before` and `after` are ids around a source's text, `prefix` is written before it.

    `lead`: the ids that an answer begins with; the first token that the model chooses comes after them.
    """

    before: tuple[int, ...]
    prefix: str
    after: tuple[int, ...]
    lead: tuple[int, ...]

    def sources(self, texts: Iterable[str], tokenizer: Tokenizer, context: int, truncate: bool) -> list[list[int]]:
        """Ids of source texts, at most `context` of each where they may be cut. RequestError says which text it is."""
        found = []
        for number, text in enumerate(texts, 1):
            try:
                found.append(self._source(text, tokenizer, context, truncate))
            except RequestError as error:
                raise RequestError(f"text {number}: {error}") from None
        return found

    def _source(self, text: str, tokenizer: Tokenizer, context: int, truncate: bool) -> list[int]:
        if not truncate:
            tokenizer.check_length(text, context)
        ids = tokenizer.encode(self.prefix + text if isinstance(text, str) else text, bos=False)
        if truncate:
            ids = ids[: max(0, context - len(self.before) - len(self.after))]
        whole = [*self.before, *ids, *self.after]
        if not whole:
            raise RequestError("it is empty, and this model has no token to end it with")
        return whole


def direction(manifest: Manifest, source_language: str | None = None, target_language: str | None = None) -> Direction:
    """What the manifest says about these two languages; None leaves the choice to the model.

    Raises RequestError where the model knows no such language, or wants to be told one.
    """
    assert manifest.start is not None
    after = () if manifest.end is None else (manifest.end,)
    begin: tuple[int, ...] = (manifest.bos,) if manifest.add_bos and manifest.bos is not None else ()
    forced, prefix = manifest.forced, ""
    if manifest.languages:
        asked = {"source_language": source_language, "target_language": target_language}
        needed = {"source_language": not begin, "target_language": not forced}
        found = _languages(manifest.languages, {k: v for k, v in asked.items() if v is not None or needed[k]})
        begin, forced = found.get("source_language", begin), found.get("target_language", forced)
    elif source_language is not None or target_language is not None:
        prefix = _prefix(manifest, source_language, target_language)
    return Direction(begin, prefix, after, (manifest.start, *forced))


def _languages(languages: dict[str, int], asked: dict[str, str | None]) -> dict[str, tuple[int, ...]]:
    """What was asked for -> its id. Raises RequestError for all that is unknown or not said."""
    import difflib

    unsaid = [what for what, name in asked.items() if name is None]
    faults = []
    if unsaid:
        wanted = f"{' and '.join(unsaid)}: this model wants to be told {'one' if len(unsaid) == 1 else 'two'}"
        faults.append(f"{wanted} of {_listed(languages)} (`llmc translate` has --from and --to)")
    found = {}
    for what, name in asked.items():
        fitting = [] if name is None else _fitting(languages, name)
        if name is not None and len(fitting) != 1:
            near = fitting or difflib.get_close_matches(name, languages, 3) or languages
            faults.append(f"{what}: got {name[:40]!r}, wanted one of {_listed(near)}")
        found[what] = tuple(languages[own] for own in fitting)
    if faults:
        raise RequestError("; ".join(faults))
    return found


def _fitting(languages: dict[str, int], name: str) -> list[str]:
    """Languages of this name, or with what stands before the "_" of theirs: "fr" for fr_XX."""
    if name in languages:
        return [name]
    return [own for own in languages if name.lower() in (own.lower(), own.lower().partition("_")[0])]


def _prefix(manifest: Manifest, source: str | None, target: str | None) -> str:
    """The sentence for two languages, or for one of them where that leaves no choice."""
    pairs = {tuple(pair.split(" to ")): prefix for pair, prefix in manifest.prefixes.items()}
    fitting = [prefix for pair, prefix in pairs.items() if source in (None, pair[0]) and target in (None, pair[-1])]
    if len(fitting) == 1:
        return fitting[0]
    asked = " to ".join(name[:40] if name else "any" for name in (source, target))
    if not pairs:
        raise RequestError(f"languages: got {asked}, and this model does not let them be chosen: give none")
    raise RequestError(f"languages: got {asked}, wanted one of {_listed(manifest.prefixes)}, or none")


def _listed(names: Iterable[str]) -> str:
    """At most `_LISTED` names.

    >>> _listed(["de", "en"])
    'de, en'
    """
    each = sorted(names)
    more = len(each) - _LISTED
    return ", ".join(each[:_LISTED]) + (f" and {more} more" if more > 0 else "")
