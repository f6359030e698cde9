"""hf:org/name -> files on this machine, through huggingface-hub and its cache.

`hf:org/name` is a repository's model in a folder, `hf:org/name:FILE.gguf` one file of it (with the other parts of a
split one); `@revision` after the name is a branch, a tag or a commit. Only the files that a compile reads are fetched.
Without a network, or with HF_HUB_OFFLINE=1, it is what the cache holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.progress import Progress
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.strict_json import read_json
from llmc.frontends.hf import modelopt
from llmc.frontends.tokenizers.folder import FILES as TOKENIZER_FILES

PREFIX = "hf:"
MAIN = "main"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"hf:({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,254}}))?(?::(.+\.gguf))?")
_SPLIT = re.compile(r"(.*)-00001-of-([0-9]{5})\.gguf")
_TEXTS = (
    "config.json", "generation_config.json", "chat_template.jinja", "modules.json", "1_Pooling/config.json",
    "sentence_bert_config.json", modelopt.FILE, *TOKENIZER_FILES,
)  # fmt: skip
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there
_INDEX = ".index.json"
_MAX_INDEX = 64 << 20


@dataclass(frozen=True)
class Place:
    """A repository, a revision of it, and one file or all that the model needs."""

    repository: str
    revision: str
    file: str | None

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + (f"@{self.revision}" if self.revision != MAIN else "")


def is_hub(source: str | Path) -> bool:
    """Whether a source is meant to be on a hub."""
    return str(source).startswith(PREFIX)


def place_of(source: str) -> Place:
    """What `source` names. Raises SourceError."""
    found = _NAME.fullmatch(source)
    file = found[3] if found else None
    if found is None or ".." in source or (file and (file.startswith("/") or "\\" in file or not file.isprintable())):
        raise SourceError(f"{clip(source)}: wanted hf:org/name, hf:org/name@revision or hf:org/name:FILE.gguf")
    return Place(found[1], found[2] or MAIN, file)


def with_revision(source: str, revision: str) -> str:
    """`source` at that revision. Raises SourceError where it is not on a hub, or names another one itself."""
    place = place_of(source)
    if place.revision not in (MAIN, revision):
        raise SourceError(f"{clip(source)}: --revision {clip(revision)} is another one")
    named = f"{PREFIX}{place.repository}@{revision}" + (f":{place.file}" if place.file else "")
    place_of(named)
    return named


def fetch(source: str, progress: Progress | None = None) -> Path:
    """The folder or the file, fetched where it is not in the cache. Raises SourceError saying what to do."""
    place = place_of(source)
    try:
        import huggingface_hub as hub
    except ImportError:
        raise SourceError(f"{place}: huggingface-hub is not installed; pip install 'llmc[hub]'") from None
    try:
        return _fetch(hub, place, progress or (lambda stage, done, total: None))
    except hub.errors.GatedRepoError:
        raise SourceError(
            f"{place}: is gated; accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except hub.errors.RevisionNotFoundError:
        raise SourceError(f"{place}: has no revision {place.revision!r}") from None
    except hub.errors.RepositoryNotFoundError:
        raise SourceError(
            f"{place}: not found; check the name, or if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except SourceError:
        raise
    except Exception as error:  # of whichever HTTP library the hub's client uses
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(
            f"{place}: cannot be fetched: {clip(reason)}; run the same again: files that are whole are kept"
        ) from None


def _fetch(hub: Any, place: Place, progress: Progress) -> Path:
    try:
        info = hub.HfApi().model_info(place.repository, revision=place.revision, files_metadata=True)
    except hub.errors.HfHubHTTPError:
        raise
    except Exception as error:  # offline, whether asked for or not
        return _cached(hub, place, error)
    sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
    download = _Download(hub, place, info.sha, sizes, progress)
    if place.file is not None:
        return download.all(_parts(place, sizes))[0]
    weights = download.weights()
    names = [name for name in _TEXTS if name in sizes] + weights
    return _folder(download.all(names), names)


def _folder(paths: list[Path], names: list[str]) -> Path:
    """The folder that the files lie in, some of them deeper."""
    return paths[0].parents[len(Path(names[0]).parts) - 1]


def _cached(hub: Any, place: Place, error: Exception) -> Path:
    """What an earlier run has fetched: a whole file, or a folder with weights."""
    wanted = (place.file,) if place.file is not None else (*_WEIGHTS, *(name + _INDEX for name in _WEIGHTS))
    for name in wanted:
        found = hub.try_to_load_from_cache(place.repository, name, revision=place.revision)
        if isinstance(found, str):
            return Path(found) if place.file is not None else Path(found).parent
    reason = " ".join(str(error).split()) or type(error).__name__
    raise SourceError(
        f"{place}: is not in the cache, and the hub cannot be reached ({clip(reason)}); check the network, "
        "HF_ENDPOINT and HF_HUB_OFFLINE"
    ) from None


def _parts(place: Place, sizes: dict[str, int]) -> list[str]:
    """The file, and the others of a split one."""
    file = str(place.file)
    split = _SPLIT.fullmatch(file)
    names = [f"{split[1]}-{i:05}-of-{split[2]}.gguf" for i in range(1, int(split[2]) + 1)] if split else [file]
    if absent := [name for name in names if name not in sizes]:
        offered = [name for name in sizes if name.endswith(".gguf")]
        raise SourceError(f"{place}: has no {clip(absent[0])}; its GGUF files: {clip(', '.join(offered) or 'none')}")
    return names


class _Download:
    """Fetches files of one commit, telling how many bytes are here."""

    def __init__(self, hub: Any, place: Place, commit: str, sizes: dict[str, int], progress: Progress) -> None:
        self._hub, self._place, self._commit = hub, place, commit
        self._sizes, self._progress = sizes, progress
        self._revision = place.revision  # of the first file, so that the cache learns which commit it is

    def all(self, names: list[str]) -> list[Path]:
        """Where the files are now."""
        total, done = sum(self._sizes[name] for name in names), 0
        paths = []
        for name in names:
            paths.append(self.one(name, done, total))
            done += self._sizes[name]
            self._progress("fetch", done, total)
        return paths

    def one(self, name: str, before: int = 0, total: int = 0) -> Path:
        """A file; when the line breaks off, the rest of it is asked for."""
        bar = _bar(self._hub, lambda here: self._progress("fetch", before + here, total) if total else None)
        path = Path(self._hub.hf_hub_download(self._place.repository, name, revision=self._revision, tqdm_class=bar))
        if self._commit not in path.parts:
            raise SourceError(f"{self._place}: has changed while it was fetched; run the same again")
        self._revision = self._commit
        return path

    def weights(self) -> list[str]:
        """The names of the files of weights: one, or an index and its shards."""
        for whole in _WEIGHTS:
            if whole in self._sizes:
                return [whole]
            if whole + _INDEX not in self._sizes:
                continue
            data = self.one(whole + _INDEX).read_bytes()[: _MAX_INDEX + 1]
            shards = read_json(data, whole + _INDEX).get("weight_map")
            names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
            absent = [name for name in names if name not in self._sizes or "/" in name]
            if absent or not names:
                raise SourceError(f"{self._place}: {whole}{_INDEX} names {clip(absent or shards)}, which are not there")
            return [whole + _INDEX, *names]
        files = [name for name in self._sizes if name.endswith(".gguf")]
        if files:
            raise SourceError(
                f"{self._place}: has GGUF files; give one: {self._place}:{files[0]} (of {clip(', '.join(files))})"
            )
        raise SourceError(f"{self._place}: has no {' or '.join(_WEIGHTS)}, nor an index of its shards, nor GGUF files")


def _bar(hub: Any, told: Callable[[int], None]) -> Any:
    """A class of the hub's progress bars that draws nothing, and tells how many bytes of a file are here."""

    class Bar(hub.utils.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._here = int(options.get("initial") or 0)
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self._here += int(n or 0)
            told(self._here)

    return Bar
