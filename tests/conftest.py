"""Fixtures that many tests share: the demo model, artifacts made from it, tiny random models."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

_MPI = importlib.util.find_spec("mpi4py") is not None and Path(sys.executable).with_name("mpirun").is_file()

# A shell that runs this in the background ignores Ctrl-C for all below it, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Two test processes with as many native threads as cores each only wait for one another.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a hub
# A kernel that is made is a million objects and none of them garbage: as `llmc` itself does.
gc.set_threshold(100_000)


def _keep_to_one_core(worker: str) -> None:
    """A worker of pytest-xdist ("gw0") has a core of its own, and so one thread of every native library."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    _keep_to_one_core(os.environ["PYTEST_XDIST_WORKER"])


def pytest_itemcollected(item: pytest.Function) -> None:
    """What the marks `thorough_if` and `mpi` mean (pyproject.toml)."""
    for mark in item.iter_markers("thorough_if"):
        case = mark.kwargs["case"]
        if case(**{name: item.callspec.params[name] for name in inspect.signature(case).parameters}):
            item.add_marker(pytest.mark.thorough)
    if item.get_closest_marker("mpi") and not _MPI:
        item.add_marker(pytest.mark.skip(reason="needs mpi4py, and mpirun beside python"))


def _module_from(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # which a dataclass looks itself up in
    spec.loader.exec_module(module)
    return module


def _shared(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that all workers share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """A function `(path in the checkout) -> module`, for scripts that no package has."""
    return lambda path: _module_from(ROOT / path)


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which examples/embed_cpp and runtime/native were built, once for all workers."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    folder = _shared(tmp_path_factory, "native")
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DLLMC_PROBE=ON", "-DCMAKE_BUILD_TYPE=None"]
    checked = "-DCMAKE_CXX_FLAGS=-O1 -D_GLIBCXX_ASSERTIONS -Werror"  # a bad index ends the process
    cmake = shutil.which("cmake") or Path(sys.executable).with_name("cmake")
    configure = [cmake, "-S", ROOT / "examples" / "embed_cpp", "-B", folder, *options, checked]
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "embed_cpp").exists():
            for command in (configure, [cmake, "--build", folder, "--parallel", "2"]):
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def _made_once(write: Callable[..., None], folder: Path) -> Callable[..., None]:
    """`write_kernel`, which copies what any test has had made of an equal kernel for an equal CPU into `folder`."""
    from tvm_ffi import structural_hash

    @wraps(write)
    def write_once(name: str, function: Any, target: Any, path: str) -> None:
        about = json.dumps([name, str(target.llvm()), structural_hash(function)])
        made = folder / f"{hashlib.sha256(about.encode()).hexdigest()}.o"
        if made.exists():
            shutil.copy(made, path)
            return
        write(name, function, target, path)
        aside = made.with_suffix(f".{os.getpid()}")
        shutil.copy(path, aside)
        aside.rename(made)

    return write_once


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Most of a small model's compile is machine code of kernels that another test has had made."""
    machine_code = sys.modules.get("llmc.compiler.driver.machine_code")
    if machine_code is not None:  # else no test here compiles
        folder = _shared(tmp_path_factory, "kernels")
        machine_code.write_kernel = _made_once(machine_code.write_kernel, folder)


@pytest.fixture(scope="module")
def plain_code() -> Iterator[None]:
    """LLVM optimizes nothing that these tests compile, which takes it a tenth of the time.

    For tests of graphs, weights and processes, within tolerances: tests/targets has the kernels as they are shipped.
    """
    import tvm

    from llmc.targets.target import Target

    llvm = Target.llvm

    def plain(target: Target) -> Any:
        config = {name: value for name, value in llvm(target).export().items() if name != "tag"}
        return tvm.target.Target({**config, "opt-level": 0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "llvm", plain)
        yield


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code is made again: for tests that compare it."""
    from llmc.compiler.driver import machine_code

    monkeypatch.setattr(machine_code, "write_kernel", machine_code.write_kernel.__wrapped__)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file, downloaded once into the cache folder."""
    return Path(_module_from(ROOT / "examples" / "fetch_smollm2.py").fetch())


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2's folder, downloaded once into the cache folder."""
    return Path(_module_from(ROOT / "examples" / "fetch_minilm.py").fetch())


@pytest.fixture(scope="session")
def minilm_onnx() -> Path:
    """all-MiniLM-L6-v2 as an ONNX graph with int8 weights, downloaded once into the cache folder."""
    return Path(_module_from(ROOT / "examples" / "fetch_onnx.py").fetch_minilm())


@pytest.fixture(scope="session")
def flan_t5() -> Path:
    """The folder of flan-t5-small in int8 ONNX files, downloaded once into the cache folder."""
    return Path(_module_from(ROOT / "examples" / "fetch_onnx.py").fetch_flan_t5())


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M's GGUF file where someone fetched it and so accepted its terms; else the test is skipped."""
    path: Path | None = _module_from(ROOT / "tests" / "bench" / "fetch_gemma3.py").cached()
    if path is None:
        pytest.skip("Gemma 3 270M is not in the cache folder: python tests/bench/fetch_gemma3.py")
    return path


@pytest.fixture(scope="session")
def smollm2_artifact(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function `(quant="q8", kv="auto", target="cpu") -> artifact`; each is compiled once."""
    from llmc.compiler.driver import compile_model

    folder = _shared(tmp_path_factory, "smollm2")

    def artifact(quant: str = "q8", kv: str = "auto", target: str = "cpu") -> Path:
        path = folder / f"{quant}-{kv}-{target.replace(':', '-')}.llmc"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                compile_model(str(smollm2_gguf), str(path), quant=quant, kv=kv, target=target)
        return path

    return artifact


# A template that any conversation of the roles system, user and assistant renders with.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function `(model_type, **config) -> folder` that saves a random model as transformers does.

    Keywords are its config's, beside those of _TINY that the family knows; `seed` and `shards` (of about equal size)
    come on top. The tokenizer is a byte-level BPE of `vocab_size` entries at most, with <s>, </s> and the chat markers.
    """
    made: dict[str, Path] = {}

    def folder(model_type: str, seed: int = 0, shards: int = 1, **config: Any) -> Path:
        key = json.dumps([model_type, seed, shards, config], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"tiny-{model_type}")
            save_tiny(made[key], model_type, config, seed, shards)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """`tiny_model` for a Llama."""
    return partial(tiny_model, "llama")


@pytest.fixture(scope="session")
def tiny_translator(script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model with an encoder that translates between en, fr and de; its artifact is tiny.llmc."""
    from llmc.compiler.driver import compile_model

    folder = tmp_path_factory.mktemp("translator")
    _, config = script("tests/end_to_end/translator_cases.py").TRANSLATORS["M2M100, NLLB"]
    save = script("tests/end_to_end/tiny_translator.py").save_translator
    sizes = {"encoder_layers": 3, "decoder_layers": 2}
    save(folder, "m2m_100", {**config, **sizes}, 0, ("__en__", "__fr__", "__de__"))
    compile_model(folder, folder / "tiny.llmc", quant="q8", check=True)
    return folder


def save_tiny(folder: Path, model_type: str, config: dict[str, Any], seed: int = 0, shards: int = 1) -> None:
    """What the fixture `tiny_model` gives, in this folder."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = {**_TINY, **config}
    torch.manual_seed(seed)
    kind = CONFIG_MAPPING[model_type]
    known = {*kind().to_dict(), *kind.attribute_map}
    theirs = {key: value for key, value in config.items() if key in known or key not in _TINY}
    model = AutoModelForCausalLM.from_config(kind(**theirs))
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights too: a weight of ones would hide a norm that is left out.
            parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // shards + 1024 if shards > 1 else "50GB")
    _save_tokenizer(folder, config["vocab_size"])


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["The capital of France is Paris.", "one two three four five six seven", "naïve café"]
    tokenizer.train_from_iterator(text * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
