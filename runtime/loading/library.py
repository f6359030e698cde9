"""Loads the compiled library of a checked artifact: TVM's runtime first, then the step function.

The runtime library must come first and globally, because the artifact's library looks up its thread pool when it is
loaded. Only tvm_ffi is imported, never the compiler.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from llmc.runtime.errors import ArtifactError
from llmc.runtime.loading import cuda, pinning
from llmc.runtime.loading.artifact import Artifact
from llmc.runtime.loading.cpu import default_threads
from llmc.runtime.loading.integrity import file_sha256

# DLDeviceType kDLCPU; tvm::runtime::memory::AllocatorType kNaive. kPooled keeps buffers of every number of rows that a
# step ever had, so memory would grow for as long as new ones come; it is no faster.
_CPU, _DEVICE_ID, _NAIVE = 1, 0, 1
# kDLCUDA; on a device memory is too dear to ask for at every step, and steps there have few sizes (cuda/padding.py).
_CUDA, _POOLED = 2, 2
_CUBIN = "llmc cubin base64 "  # before a cubin that stands where TVM would keep source (targets/cuda/build.py)
_MAPS = Path("/proc/self/maps")
_SPINS = "3000"  # about a millisecond; TVM's own number is a hundred times that
_ANY_CORE = 0  # mode of runtime.config_threadpool: neither big nor little cores


class _Process:
    """What a process can do only once: load TVM's runtime, and size its thread pools."""

    lock = threading.Lock()
    runtime_sha256: str | None = None
    cuda_sha256: str | None = None
    pool = threading.local()  # .threads: the size set for the calling thread's pool


def load_functions(
    artifact: Artifact[Any], names: Sequence[str], kernels: Sequence[str] = ()
) -> list[Callable[..., Any]]:
    """Functions of the artifact's chosen library, such as `step`, and kernels that are called by themselves.

    Raises ArtifactError when it cannot be loaded, or lacks one.
    """
    manifest = artifact.manifest
    with _Process.lock:
        ffi = import_ffi()
        _load_runtime(artifact)
        name = artifact.variant.file
        artifact.check_unchanged(name)
        try:
            places = [(_CPU, _DEVICE_ID, _NAIVE)]
            if artifact.variant.device is not None:
                _load_cuda_runtime_of(artifact, artifact.variant.device.runtime)
                places.insert(0, (_CUDA, _DEVICE_ID, _POOLED))
            library = ffi.load_module(str(artifact.path(name)))
            executable = library["vm_load_executable"]()
            executable["vm_initialization"](*itertools.chain(*places))
            functions: list[Callable[..., Any]] = [executable[name] for name in names]
            functions += [library.get_function(name, query_imports=True) for name in kernels]
        except (OSError, RuntimeError, AttributeError, KeyError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            tvm = str(manifest.raw["compiler"].get("tvm"))[:40]
            raise ArtifactError(
                f"{artifact.path(name)}: cannot be loaded (made by tvm {tvm}): {reason[-1][:300]}"
            ) from error
    return functions


def use_threads(threads: int) -> None:
    """Make kernels called from this thread run on `threads` threads; TVM keeps one pool per calling thread."""
    if getattr(_Process.pool, "threads", None) != threads:
        with pinning.new_threads_pinned():
            import_ffi().get_global_func("runtime.config_threadpool")(_ANY_CORE, threads)
        _Process.pool.threads = threads


def set_most_threads(threads: int) -> None:
    """Allow pools of up to `threads` threads; works only before this process starts its first pool.

    TVM would otherwise take half of the CPUs and bind the calling thread to the first one, for good. Its threads ask
    for work again and again, for as long as it takes from one step to the next, and then sleep.
    """
    os.environ["TVM_BIND_THREADS"] = "0"
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", _SPINS)
    os.environ["TVM_NUM_THREADS"] = str(max(threads, default_threads(), _most_threads()))


def _most_threads() -> int:
    value = os.environ.get("TVM_NUM_THREADS", "")
    return int(value) if value.isdecimal() else 0


def import_ffi() -> Any:
    """The module tvm_ffi, without torch.

    Nor importlib.metadata, a third of what is left, by which it would look for its own library, which lies beside it;
    but another thread could be importing that right now. Its part that builds C++ is imported when somebody uses it,
    and so is the one that looks for torch.
    """
    if "tvm_ffi" not in sys.modules:
        with without_torch(), _put_off("tvm_ffi.cpp", "tvm_ffi._optional_torch_c_dlpack"):
            if threading.active_count() == 1:
                _import_undistributed()
            importlib.import_module("tvm_ffi")
    return sys.modules["tvm_ffi"]


def without_torch() -> AbstractContextManager[None]:
    """Whoever imports tvm_ffi or tvm does without torch, which these import where it is installed: seconds."""
    return _replaced("torch", None)


@contextmanager
def _put_off(*names: str) -> Iterator[None]:
    """Whoever imports one of these modules gets one that is read when it is first used."""
    finder = _Lazily(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Lazily:
    """Finds some modules as all others are found, but has them loaded lazily."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing for any other module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.names else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def _import_undistributed() -> None:
    with _replaced("importlib.metadata", _Undistributed("importlib.metadata")):
        import tvm_ffi.libinfo
    vars(tvm_ffi.libinfo)["im"] = _Metadata("importlib.metadata")


class _Undistributed(ModuleType):
    """In place of importlib.metadata: no package was installed."""

    PackageNotFoundError = ModuleNotFoundError

    def distribution(self, name: str) -> Any:
        """Never there."""
        raise ModuleNotFoundError(name)


class _Metadata(ModuleType):
    """importlib.metadata, imported when somebody asks for it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _replaced(name: str, module: ModuleType | None) -> Iterator[None]:
    """A stand-in for a module that nobody has imported yet; None makes `import` raise ImportError."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _load_runtime(artifact: Artifact[Any]) -> None:
    """Load the artifact's copy of TVM's runtime, unless this process has one already: then it must be the same."""
    name = artifact.manifest.runtime
    sha256 = artifact.manifest.files[name].sha256
    if _Process.runtime_sha256 is None:
        loaded = _mapped_runtime()
        _Process.runtime_sha256 = None if loaded is None else file_sha256(loaded)
    if _Process.runtime_sha256 is not None:
        if sha256 != _Process.runtime_sha256:
            raise ArtifactError(
                f"{artifact.path(name)}: this process already runs another version of TVM's runtime; "
                "load this artifact in a process of its own, or compile both with one llmc"
            )
        return
    artifact.check_unchanged(name)
    try:
        ctypes.CDLL(str(artifact.path(name)), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ArtifactError(f"{artifact.path(name)}: cannot be loaded: {str(error)[:300]}") from error
    _Process.runtime_sha256 = sha256


def _load_cuda_runtime_of(artifact: Artifact[Any], name: str) -> None:
    """Load the artifact's copy of TVM's CUDA runtime, unless this process has one: a second one ends the process."""
    sha256 = artifact.manifest.files[name].sha256
    if _Process.cuda_sha256 is None:
        artifact.check_unchanged(name)
        load_cuda_runtime(artifact.path(name))
        _Process.cuda_sha256 = sha256
    elif _Process.cuda_sha256 != sha256:
        raise ArtifactError(
            f"{artifact.path(name)}: this process already runs another version of TVM's CUDA runtime; "
            "load this artifact in a process of its own, or compile both with one llmc"
        )


def load_cuda_runtime(path: Path) -> None:
    """Load TVM's CUDA runtime, a file, once in a process; cubins are taken out of their text then. Raises OSError."""
    ctypes.CDLL(cuda.cudart_path(), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    import_ffi().register_global_func("tvm_callback_cuda_compile", _cubin, override=True)


def _cubin(source: str, *_: Any) -> bytes:
    if not source.startswith(_CUBIN):
        raise ArtifactError("a library with CUDA source in it; compile the model again")
    return base64.b64decode(source[len(_CUBIN) :])


def _mapped_runtime() -> Path | None:
    """The TVM runtime that something else, such as `import tvm`, loaded into this process."""
    try:
        maps = _MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if path.endswith("/libtvm_runtime.so"):
            return Path("/" + path).resolve()
    return None
