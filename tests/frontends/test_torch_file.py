"""Files that torch.save wrote: every layout, every way a tensor may lie in its storage, and damage."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from llmc.compiler.errors import SourceError
from llmc.frontends.files.safetensors_file import read_safetensors
from llmc.frontends.files.torch_file import StridedTensor, read_torch
from llmc.frontends.hf.quantization import packing_of
from llmc.frontends.source import open_model

sys.path.insert(0, str(Path(__file__).parent))
from int4_layers import PACKINGS, config_of, random_layer

PROTOCOLS = (2, 3, 4, 5)
FUZZ = settings(
    max_examples=400,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def save(path: Path, value: Any, zipped: bool = True, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return path


def equal(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    tensors = read_torch(path)
    assert list(tensors) == list(wanted)
    for name, tensor in tensors.items():
        assert tensor.shape == tuple(wanted[name].shape)
        np.testing.assert_array_equal(tensor.read(), wanted[name].detach().float().numpy())


def views() -> dict[str, torch.Tensor]:
    """Tensors that share a storage in every way a checkpoint has them."""
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    return {
        "whole": base,
        "tied": base,
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "transposed": base.T,
        "rows": base[2:5],
        "columns": base[:, 3:7],
        "every third": base[::3, ::2],
        "column": base[:, 4],
        "row": base[3],
        "number": base[5, 9],
        "turned": base.reshape(2, 3, 10).permute(2, 0, 1),
        "one row": base[1:2].T,
        "empty": torch.zeros(0, 5),
        "f16": (torch.arange(15).reshape(3, 5) / 7).half(),
        "bf16 turned": (torch.arange(15).reshape(3, 5) / 7).bfloat16().T,
    }


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_torch_saves_is_read(tmp_path: Path, zipped: bool, protocol: int) -> None:
    equal(save(tmp_path / "x.bin", views(), zipped, protocol), views())
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    state = module.state_dict()  # an OrderedDict with an attribute
    equal(save(tmp_path / "y.bin", state, zipped, protocol), dict(state))


def test_what_lies_in_order_is_mapped_and_the_rest_is_gathered(tmp_path: Path) -> None:
    tensors = read_torch(save(tmp_path / "x.bin", views()))
    strided = {name for name, tensor in tensors.items() if isinstance(tensor, StridedTensor)}
    assert strided == {"transposed", "columns", "every third", "column", "turned", "bf16 turned"}
    assert tensors["tied"].offset == tensors["whole"].offset
    assert tensors["rows"].offset == tensors["whole"].offset + 2 * 10 * 4
    for name in ("transposed", "columns", "rows"):
        np.testing.assert_array_equal(tensors[name].read_rows(1, 3), views()[name][1:3].numpy())
    assert tensors["transposed"].read_rows(2, 2).shape == (0, 6)


SLICES = st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 3))


@FUZZ
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    slices=st.lists(SLICES, min_size=4, max_size=4),
    order=st.randoms(use_true_random=False),
    kind=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    zipped=st.booleans(),
)
def test_any_view_of_a_storage(
    tmp_path: Path, sizes: list[int], slices: list[tuple[int, int, int]], order: Any, kind: Any, zipped: bool
) -> None:
    """Slices with steps, of turned tensors: what torch reads from the same storage, whole and by rows."""
    base = torch.arange(int(np.prod(sizes))).reshape(sizes).to(kind)
    turned = base.permute(*order.sample(range(len(sizes)), len(sizes)))
    part = turned[tuple(slice(start, start + length, step) for start, length, step in slices[: len(sizes)])]
    path = save(tmp_path / "x.bin", {"a": part, "base": base}, zipped)
    equal(path, {"a": part, "base": base})
    rows = part.shape[0]
    found = read_torch(path)["a"].read_rows(rows // 3, rows - rows // 4)
    np.testing.assert_array_equal(found, part[rows // 3 : rows - rows // 4].float().numpy())


@pytest.mark.parametrize("kind", ["float64", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn"])
def test_other_types_are_known_by_name_and_refused_when_read(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(2, 3).to(getattr(torch, kind)), "b": torch.ones(2)})
    tensors = read_torch(path)
    np.testing.assert_array_equal(tensors["b"].read(), np.ones(2))
    with pytest.raises(SourceError, match="a is stored as .*, wanted one of F32"):
        tensors["a"].read()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_no_plain_tensor_is_refused_by_name(tmp_path: Path, zipped: bool) -> None:
    cases: dict[str, tuple[Any, str]] = {
        "a list": ([torch.ones(2)], "wanted a dict"),
        "a dict of dicts": ({"state_dict": {"a": torch.ones(2)}}, "'state_dict' is .*wanted a tensor"),
        "a number": ({"step": 3}, "'step' is 3, wanted a tensor"),
        "a numbered tensor": ({1: torch.ones(2)}, "key 1, wanted the name"),
        "a module": (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        "complex": ({"a": torch.ones(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        "sparse": ({"a": torch.eye(3).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        "expanded": ({"a": torch.ones(1).expand(1000)}, "shape .1000. and strides .0."),
        "overlapping": ({"a": torch.ones(9).as_strided((5, 5), (1, 1))}, "in a storage of 36 bytes"),
        "negated": ({"a": torch.ones(2, dtype=torch.complex64).conj().imag}, "a tensor with {'neg': True}"),
        "NumPy": ({"a": np.ones(2)}, "refers to .numpy"),
        "a set": ({"a": {1, 2}}, "refers to .__builtin__.set"),
    }
    for value, message in cases.values():
        path = save(tmp_path / "x.bin", value, zipped)
        with pytest.raises(SourceError, match=message) as caught:
            read_torch(path)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("x.bin: ")


def test_other_byte_orders_and_programs_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.ones(2)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"little", b"bigger"))
    with pytest.raises(SourceError, match="big-endian"):
        read_torch(path)
    old = save(tmp_path / "x.bin", {"a": torch.ones(2)}, zipped=False).read_bytes()
    at = old.index(b"little_endian")
    path.write_bytes(old[:at] + old[at:].replace(b"\x88", b"\x89", 1))
    with pytest.raises(SourceError, match="big-endian"):
        read_torch(path)
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)
    with pytest.raises(SourceError, match="TorchScript|what torch.save writes"):
        read_torch(path)


def test_a_storage_that_is_cut_or_missing(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.ones(2)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"x/data/0", b"x/data/7"))
    with pytest.raises(SourceError, match="no file 'x/data/0' in the archive"):
        read_torch(path)
    old = save(tmp_path / "x.bin", {"a": torch.ones(2)}, zipped=False).read_bytes()
    for changed, message in (
        (old[:-1], "8 bytes at .* but the file has"),
        (old + b"x", "1 bytes after the last storage"),
        (old[:-16] + (3).to_bytes(8, "little") + old[-8:], "has 3 values, wanted 2"),
    ):
        path.write_bytes(changed)
        with pytest.raises(SourceError, match=message):
            read_torch(path)


def repacked(path: Path, compression: int = zipfile.ZIP_STORED, **changes: bytes | None) -> Path:
    """The archive, written by Python, with files of it replaced, added or left out (None); "a__b" stands for a/b."""
    with zipfile.ZipFile(path) as archive:
        files: dict[str, bytes | None] = {name: archive.read(name) for name in archive.namelist()}
    files |= {name.replace("__", "/"): content for name, content in changes.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            if content is not None:
                archive.writestr(name, content)
    return path


def test_archives_that_are_not_what_torch_writes(tmp_path: Path) -> None:
    def fresh() -> Path:
        return save(tmp_path / "x.bin", {"a": torch.ones(2)})

    with zipfile.ZipFile(fresh()) as archive:
        pickled = archive.read("x/data.pkl")
    equal(repacked(fresh()), {"a": torch.ones(2)})
    equal(repacked(fresh(), x__byteorder=None), {"a": torch.ones(2)})  # older files lack it
    cases: list[tuple[dict[str, Any], str]] = [
        ({"compression": zipfile.ZIP_DEFLATED}, "is compressed"),
        ({"x__data.pkl": None}, "0 files data.pkl"),
        ({"y__data.pkl": pickled}, "2 files data.pkl"),
        ({"x__data.pkl": pickled + b"cos\nsystem\n."}, "data.pkl goes on for 12 bytes after its end"),
        ({"x__data.pkl": b"cos\nsystem\n(U\4truetR" + pickled}, "wanted a pickle of protocol 2"),
        ({"x__data.pkl": pickled[:-1]}, "1 bytes wanted, but there are 0"),
        ({"x__constants.pkl": b""}, "a TorchScript program"),
        ({"x__byteorder": b"big"}, "big-endian"),
        ({"x__data__0": None}, "no file 'x/data/0'"),
        ({"x__data__0": b"1234567"}, "storage '0' of 2 F32 has 7 bytes"),
        ({"x__data__0": bytes(9)}, "storage '0' of 2 F32 has 9 bytes"),
        ({"..__etc": b""}, "'../etc', wanted a path in the archive"),
    ]
    for changes, message in cases:
        path = repacked(fresh(), **changes)
        with pytest.raises(SourceError, match=message):
            read_torch(path)


MOST = (1 << 63) - 1


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(1, 2, 1), (0, 3, 1), (0, 2, 2), (0, 2, MOST), (MOST, 2, 1), (2, 1, 1), (0, MOST, 0), (0, MOST, MOST)],
)
def test_a_view_that_leaves_its_storage(tmp_path: Path, offset: int, size: int, stride: int) -> None:
    """It would read what lies behind: here, another tensor."""
    path = save(tmp_path / "x.bin", {"a": torch.ones(2), "b": torch.zeros(100)})
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("x/data.pkl")
    raw = [b"\x8a\x08" + number.to_bytes(8, "little") for number in (offset, size, stride)]
    changed, count = re.subn(
        rb"QK\x00K\x02\x85(q.)K\x01\x85", lambda m: b"Q" + raw[0] + raw[1] + b"\x85" + m[1] + raw[2] + b"\x85", pickled
    )
    assert count == 1
    with pytest.raises(
        SourceError, match=f"'a': shape .{size}. and strides .{stride}. from {offset} in a storage of 8"
    ):
        read_torch(repacked(path, **{"x__data.pkl": changed}))


def torch_twin(folder: Path, to: Path, shards: bool = False, zipped: bool = True) -> Path:
    """The same model with its weights in pytorch_model.bin."""
    from safetensors.torch import load_file

    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_file(folder / "model.safetensors")
    if not shards:
        save(to / "pytorch_model.bin", tensors, zipped)
        return to
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, part in parts.items():
        save(to / file, {name: tensors[name] for name in part}, zipped)
    places = {name: file for file, part in parts.items() for name in part}
    (to / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return to


@pytest.mark.parametrize(("shards", "zipped"), [(False, True), (False, False), (True, True), (True, False)])
def test_a_folder_opens_as_its_safetensors_twin(
    tiny_llama: Callable[..., Path], tmp_path: Path, shards: bool, zipped: bool
) -> None:
    folder = tiny_llama()
    twin = torch_twin(folder, tmp_path / "twin", shards, zipped)
    with open_model(folder) as wanted, open_model(twin) as found:
        assert found.spec.tensors == wanted.spec.tensors
        assert list(found.tensors) == list(wanted.tensors)
        for name, tensor in wanted.tensors.items():
            np.testing.assert_array_equal(found.tensors[name].read(), tensor.read())


def test_which_weights_of_a_folder_are_read(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_llama()
    twin = torch_twin(folder, tmp_path / "twin", shards=True)
    index = twin / "pytorch_model.bin.index.json"
    places = index.read_text()
    index.write_text(json.dumps({"weight_map": json.loads(places)["weight_map"] | {"ghost": "../x.bin"}}))
    with pytest.raises(SourceError, match="'../x.bin', wanted a plain name"):
        open_model(twin)
    index.write_text(places)
    (twin / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(SourceError, match="both pytorch_model.bin and pytorch_model.bin.index.json"):
        open_model(twin)
    shutil.copy(folder / "model.safetensors", twin)
    open_model(twin).close()  # safetensors come first
    for file in twin.glob("*model*"):
        file.unlink()
    with pytest.raises(SourceError, match="no model.safetensors, pytorch_model.bin or model.onnx"):
        open_model(twin)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_head_that_copies_the_embedding(tiny_llama: Callable[..., Path], tmp_path: Path, scattered: bool) -> None:
    """torch saves a tied head once more: the same storage, or one as scattered as the embedding's."""
    twin = torch_twin(tiny_llama(tie_word_embeddings=True), tmp_path / "twin")
    state = torch.load(twin / "pytorch_model.bin", weights_only=True)
    table = state["model.embed_tokens.weight"]
    if scattered:
        table = state["model.embed_tokens.weight"] = table.T.contiguous().T
    for head in (table, table.clone(memory_format=torch.preserve_format)):
        save(twin / "pytorch_model.bin", state | {"lm_head.weight": head})
        open_model(twin).close()
    save(twin / "pytorch_model.bin", state | {"lm_head.weight": head + 1})
    with pytest.raises(SourceError, match="lm_head.weight"):
        open_model(twin)


@pytest.mark.parametrize("kind", PACKINGS)
@pytest.mark.parametrize("turned", [False, True])
def test_the_parts_of_a_4_bit_layer(tmp_path: Path, kind: str, turned: bool) -> None:
    """They are read as stored bits, which must be those of the values in order."""
    layer = random_layer(24, 128, 64, PACKINGS[kind][2])
    arrays = {f"a.{part}": np.ascontiguousarray(array) for part, array in PACKINGS[kind][1](layer).items()}
    save_file(arrays, tmp_path / "x.safetensors")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if turned:
        tensors = {
            name: t.T.contiguous().T if t.ndim > 1 else t.repeat_interleave(2)[::2] for name, t in tensors.items()
        }
    packing = packing_of({"quantization_config": config_of(kind, 64)}, [])
    assert packing is not None
    wanted = packing.fold(read_safetensors(tmp_path / "x.safetensors"), "x")["a.weight"]
    found = packing.fold(read_torch(save(tmp_path / "x.bin", tensors)), "x")["a.weight"]
    np.testing.assert_array_equal(found.read(), wanted.read())
    np.testing.assert_array_equal(found.read_quantized().codes, wanted.read_quantized().codes)


def test_neither_torch_nor_pickle_is_used(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", views())
    code = (
        "import sys; from pathlib import Path; from llmc.frontends.files.torch_file import read_torch\n"
        "import pickle; pickle.Unpickler = pickle.loads = pickle.load = None\n"
        f"[t.read() for t in read_torch(Path({str(path)!r})).values()]\n"
        "assert 'torch' not in sys.modules and 'zipfile' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def samples() -> list[bytes]:
    """Small files of both layouts, of the oldest and the newest protocol."""
    state = {"a": torch.ones(3, 4).T, "b": torch.nn.Parameter(torch.ones(5).half())}
    files = []
    for zipped in (True, False):
        for protocol in (2, 5):
            buffer = io.BytesIO()
            torch.save(state, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
            files.append(buffer.getvalue())
    return files


@FUZZ
@given(
    which=st.integers(0, 3),
    edits=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=3),
    cut=st.none() | st.floats(0, 1),
)
def test_random_damage(
    samples: list[bytes], tmp_path: Path, which: int, edits: list[tuple[float, bytes]], cut: float | None
) -> None:
    data = bytearray(samples[which])
    for at, patch in edits:
        place = int(at * len(data))
        data[place : place + len(patch)] = patch
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(data if cut is None else data[: int(cut * len(data))]))
    try:
        for tensor in read_torch(path).values():
            assert tensor.read().shape == tensor.shape
    except SourceError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
        assert len(str(error)) < 1000  # noqa: PT017
