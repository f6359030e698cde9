"""From an artifact on disk to a model ready to generate: `load`, and what it takes where nobody says."""

from __future__ import annotations

import os
from numbers import Integral
from typing import TYPE_CHECKING

from llmc.runtime.bound import bind
from llmc.runtime.engine.asking import MOST_ROWS
from llmc.runtime.engine.freed_memory import give_back
from llmc.runtime.errors import ArtifactError, RequestError
from llmc.runtime.loading.artifact import Artifact, open_artifact
from llmc.runtime.loading.bind import parts_of
from llmc.runtime.loading.cpu import default_threads
from llmc.runtime.loading.device_manifest import DeviceManifest
from llmc.runtime.loading.integrity import Progress
from llmc.runtime.loading.manifest import PAGE_TOKENS, Manifest
from llmc.runtime.loading.package import Variant
from llmc.runtime.loading.weights import map_weights
from llmc.runtime.model import Model
from llmc.runtime.runner import DEVICE_CHUNK, PREFILL_CHUNK, Runner
from llmc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.runtime.workers.front import Front

_MAX_THREADS = 1024
_DRAFTS = 7  # with the token before them eight rows, which most kernels read at once
_CACHED_CONTEXTS = 8  # full sequences the cache holds unless asked otherwise, memory permitting


def load(
    path: str | os.PathLike[str],
    threads: int | None = None,
    cache_tokens: int | None = None,
    verify: str = "auto",
    progress: Progress | None = None,
    prefill_chunk: int | None = None,
    deterministic: bool = False,
    policy: str = "fcfs",
    preemption: str = "recompute",
    most_running: int = 256,
    keep_prefixes: bool = True,
    prefill: str = "chunked",
    drafts: int | None = None,
    draft_model: str | os.PathLike[str] | None = None,
    copy_weights: bool | None = None,
) -> Model:
    """Load the artifact folder at `path`, after checking it.

    threads: kernels run on this many; default, and at most, the CPUs this process may use. cache_tokens: tokens of all
    sequences together that the KV cache holds; its memory is taken only as it fills, on a GPU at once. verify: "auto"
    hashes the weights when they were not found intact before, "always" at every load. progress(stage, done, total) is
    called while it hashes, and while weights go to a GPU. prefill_chunk: rows of one step at most; default 512, and
    2,048 on a GPU. deterministic: refuse an artifact that does not promise the same tokens whatever else is in a step.
    policy, preemption, most_running, keep_prefixes, prefill, drafts: as `Engine` takes them; drafts: by default 7, and
    none on a GPU, which begins a step before it is known what the one before it says. draft_model: the artifact of a
    smaller model with the same tokenizer, which guesses tokens too. copy_weights: on CPUs, have weights in memory of
    this process, in pages of 2 MB, which may be faster than those that the system keeps of the file; default: copied
    little by little while steps run, where that is seen to be faster and twice as much memory is available; True:
    before the first; False: never.
    Raises ArtifactError or RequestError.
    """
    most = default_threads()  # TVM's threads wait by spinning: more of them than CPUs makes steps endless
    wanted = None if threads is None else min(most, _bounded("threads", threads, _MAX_THREADS))
    rows = None if prefill_chunk is None else _bounded("prefill_chunk", prefill_chunk, 2**20)
    guessed = None if drafts is None else _bounded("drafts", drafts, MOST_ROWS - 1, least=0)
    if draft_model is not None and guessed == 0:
        raise RequestError("drafts: got 0, with which a draft model has nothing to do")
    if verify not in ("auto", "always"):
        raise RequestError(f"verify: got {verify!r}, wanted auto or always")
    artifact = open_artifact(path, always_hash=verify == "always", progress=progress)
    manifest = artifact.manifest
    if copy_weights and (isinstance(manifest, DeviceManifest) or artifact.variant.device is not None):
        raise RequestError("copy_weights: for an artifact that one process runs on CPUs; a GPU has a copy anyway")
    workers = len(manifest.ranks) if isinstance(manifest, DeviceManifest) else 1
    threads = max(1, most // workers) if wanted is None else wanted
    if deterministic and manifest.invariance != "exact":
        raise ArtifactError(
            f"{artifact.folder}: deterministic: its kernels do not promise that a row's logits are the same whatever "
            "else is in the step; load it without, or compile it again"
        )
    tokenizer = Tokenizer(artifact.read(manifest.tokenizer), manifest.bos if manifest.add_bos else None)
    draft = None
    if draft_model is not None:
        draft = open_artifact(draft_model, always_hash=verify == "always", progress=progress)
        _check_draft(draft, manifest, artifact.read(manifest.tokenizer), tokenizer)
    give_back()  # reading a tokenizer takes much more memory than it keeps
    template = _template(artifact)
    tokens = None if cache_tokens is None else _bounded("cache_tokens", cache_tokens, 2**31 - 1)
    weights = map_weights(artifact.path(manifest.weights), manifest.order, copy_weights)
    front = _front(manifest)

    def tokens_in(memory: int) -> int:
        wanted = tokens or _default_cache(manifest, memory)
        return wanted if front is None else front.tokens(wanted, asked=tokens is not None)

    try:
        pages, functions = bind(
            artifact, weights, threads, tokens_in, None if front is None else front.collectives, progress
        )
    except BaseException:
        if front is not None:
            front.give_up()
        raise
    if front is not None:
        functions = front.leading(pages, functions)
    runner = Runner(
        functions["step"], pages, manifest.vocab, manifest.context, rows or _chunk(artifact.variant),
        encode_function=functions.get("encode"), turn_function=functions.get("turn"), endless=manifest.endless,
        parts=parts_of(manifest, functions), stages=1 if front is None else front.stages,
    )  # fmt: skip
    most_drafts = _DRAFTS if artifact.variant.device is None or draft is not None else 0
    return Model(
        manifest, runner, tokenizer, template,
        policy=policy, preemption=preemption, most_running=most_running, keep_prefixes=keep_prefixes, prefill=prefill,
        front=front, drafts=most_drafts if guessed is None else guessed,
        draft_model=None if draft is None else _draft_runner(
            draft, threads, pages.num_pages * PAGE_TOKENS, copy_weights, progress
        ),
    )  # fmt: skip


def _bounded(name: str, value: object, most: int, least: int = 1) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise RequestError(f"{name}: wanted a whole number in {least}..{most}")
    return int(value)


def _front(manifest: Manifest) -> Front | None:
    """Of an artifact for several devices, what leads the other workers."""
    if not isinstance(manifest, DeviceManifest):
        return None
    from llmc.runtime.workers.front import Front  # with MPI

    return Front(manifest)


def _template(artifact: Artifact[Manifest]) -> str | None:
    name = artifact.manifest.chat_template
    if name is None:
        return None
    try:
        return artifact.read(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{artifact.path(name)}: not UTF-8 at byte {error.start}") from error


def _chunk(variant: Variant) -> int:
    """Rows of one step, where nobody says how many."""
    return PREFILL_CHUNK if variant.device is None else DEVICE_CHUNK


def _check_draft(draft: Artifact[Manifest], manifest: Manifest, tokenizer_json: bytes, tokenizer: Tokenizer) -> None:
    """Raise RequestError where an artifact cannot guess for the model of `manifest`."""
    own = draft.manifest
    name, its_name = manifest.raw["name"], own.raw["name"]
    if isinstance(manifest, DeviceManifest) or isinstance(own, DeviceManifest):
        raise RequestError("draft_model: an artifact for several devices neither has one nor is one")
    if manifest.task != "generate" or own.task != "generate":
        raise RequestError(
            f"draft_model: wanted two decoders, and {name} was compiled to {manifest.task}, {its_name} to {own.task}"
        )
    its_json = draft.read(own.tokenizer)
    if its_json != tokenizer_json and not tokenizer.same_ids_as(Tokenizer(its_json)):
        raise RequestError(
            f"draft_model: token ids of {its_name} do not mean what those of {name} do; wanted a smaller model with "
            "the same tokenizer, as one of the same family"
        )


def _draft_runner(
    draft: Artifact[Manifest], threads: int, tokens: int, copy_weights: bool | None, progress: Progress | None
) -> Runner:
    """A runner of a draft model, with a cache for as many tokens as the model has that it guesses for."""
    own = draft.manifest

    def tokens_in(memory: int) -> int:
        return max(1, min(tokens, memory // own.kv.token_bytes))

    weights = map_weights(draft.path(own.weights), own.order, copy_weights)
    pages, functions = bind(draft, weights, threads, tokens_in, None, progress)
    return Runner(functions["step"], pages, own.vocab, own.context, _chunk(draft.variant))


def _default_cache(manifest: Manifest, memory: int) -> int:
    """Tokens of a cache for several full sequences, and their sources, in so many bytes at most.

    The texts of a model that is an encoder alone leave after their step, and each holds whole pages.
    """
    if manifest.task not in ("generate", "translate"):
        return manifest.context + PREFILL_CHUNK * PAGE_TOKENS
    wanted = _CACHED_CONTEXTS * manifest.context * (2 if manifest.task == "translate" else 1)
    return max(1, min(wanted, memory // manifest.kv.token_bytes))
