"""Every tensor a spec names is read, whole, in part or turned; what does not fit is told at once, in short names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import Attention, ModelSpec, Norm, Position, example, tensor_shapes
from llmc.compiler.spec.tensors import required_tensors
from llmc.frontends.binding import SHOWN, bind, group_names, near_names
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.tensor import READABLE, Tensor

Arrays = dict[str, np.ndarray[Any, Any]]
LAYER = "layers.{layer}."


def test_groups() -> None:
    names = [f"layers.{i}.q" for i in (0, 1, 2, 5, 7)] + ["layers.3.k", "head"]
    assert group_names(names) == "layers.{0-2,5,7}.q, layers.3.k, head"


def test_many_names_are_cut() -> None:
    text = group_names([f"tensor_{'x' * i}" for i in range(SHOWN + 5)])
    assert text.endswith(" and 5 more")


def test_hostile_names_are_escaped() -> None:
    assert group_names(["a\nb", "\x1b[2J"]) == r"'a\nb', '\x1b[2J'"
    assert len(group_names(["x" * 10**6])) < 200
    assert group_names(["n" + "9" * 5000]).startswith("'n999")


def test_near_names() -> None:
    missing = [f"h.{i}.attn.{x}.weight" for i in range(3) for x in "qkv"] + ["wte"]
    unread = [f"h.{i}.attention.{x}.weight" for i in range(3) for x in "vkq"] + ["lm_head"]
    pairs = {f"h.{{0-2}}.attn.{x}.weight may be h.{{0-2}}.attention.{x}.weight" for x in "qkv"}
    assert set(near_names(missing, unread).split(", ")) == pairs
    assert near_names(["aaaa"], ["bbbb"]) == near_names([], ["a"]) == near_names(["a"], []) == ""


def test_near_names_of_a_hostile_file_take_no_time() -> None:
    names = [f"{'x' * 5000}{'y' * i}" for i in range(300)]
    assert len(near_names(names, [f"{name}z" for name in names])) < 20_000


def spec_with(tensors: dict[str, str], **blocks: Any) -> ModelSpec:
    """The example with other blocks; tensors that are not said are called as ours."""
    spec = example()
    for name, block in blocks.items():
        object.__setattr__(spec, name, block)  # a ModelSpec would ask for its tensors at once
    return replace(spec, tensors={ours: tensors.get(ours, ours) for ours in required_tensors(spec)})


def gpt2_like() -> ModelSpec:
    """Everything fused or turned: 2 layers, 4 heads of 8 over 2 KV heads, 32 wide, MLP of 48, 128 positions."""
    fused = {f"{LAYER}{part}": "h.{layer}.attn.w | transposed | q k v by group" for part in "qkv"}
    biases = {f"{LAYER}{part}_bias": "h.{layer}.attn.b | q k v by group" for part in "qkv"}
    gated = {f"{LAYER}{part}": "h.{layer}.mlp | up gate" for part in ("gate", "up")}
    return spec_with(
        {**fused, **biases, **gated, f"{LAYER}o": "h.{layer}.o | transposed", "positions": "wpe | skip 2"},
        norm=Norm("layer", 1e-5, weight="plus_one", bias=True),
        attention=Attention("gqa", 4, 2, 8, 1.0, bias=True),
        position=Position("learned"),
    )


def ours_of(spec: ModelSpec) -> Arrays:
    """Random weights by our names."""
    random = np.random.default_rng(0)
    return {ours: random.standard_normal(shape).astype(np.float32) for ours, shape in tensor_shapes(spec).items()}


def gpt2_files(ours: Arrays) -> Arrays:
    """The same as the files of `gpt2_like` have them, put together by hand."""
    files = {"embedding": ours["embedding"], "wpe": np.concatenate([np.zeros((2, 32)), ours["positions"]])}
    for layer in range(2):
        own = {name.removeprefix(f"layers.{layer}."): array for name, array in ours.items() if f"s.{layer}." in name}
        w = [own[x][8 * n * g : 8 * n * (g + 1)] for g in range(2) for x, n in (("q", 2), ("k", 1), ("v", 1))]
        b = [own[f"{x}_bias"][8 * n * g : 8 * n * (g + 1)] for g in range(2) for x, n in (("q", 2), ("k", 1), ("v", 1))]
        files[f"h.{layer}.attn.w"] = np.concatenate(w).T
        files[f"h.{layer}.attn.b"] = np.concatenate(b)
        files[f"h.{layer}.mlp"] = np.concatenate([own["up"], own["gate"]])
        files[f"h.{layer}.o"] = own["o"].T
        files[f"layers.{layer}.down"] = own["down"]
        for name in ("attention_norm", "mlp_norm"):
            files[f"layers.{layer}.{name}"] = own[name] - np.float32(1)
            files[f"layers.{layer}.{name}_bias"] = own[f"{name}_bias"]
    return files | {"final_norm": ours["final_norm"] - np.float32(1), "final_norm_bias": ours["final_norm_bias"]}


def stored(arrays: Arrays, path: Path, **kinds: str) -> dict[str, Tensor]:
    """The arrays as float32 tensors of one file; `kinds` says of some that they are stored otherwise."""
    raw = [np.ascontiguousarray(array, "<f4").tobytes() for array in arrays.values()]
    path.unlink(missing_ok=True)
    path.write_bytes(b"".join(raw))
    file = open_mapped(path, 1)
    starts = np.cumsum([0, *map(len, raw)]).tolist()
    return {
        name: Tensor(name, array.shape, kinds.get(name, "F32"), starts[i], array.nbytes, file)
        for i, (name, array) in enumerate(arrays.items())
    }


@pytest.fixture
def files() -> Arrays:
    arrays = gpt2_files(ours_of(gpt2_like()))
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def test_every_view_of_a_model(files: Arrays, tmp_path: Path) -> None:
    spec = gpt2_like()
    ours, bound = ours_of(spec), bind(spec, stored(files, tmp_path / "t"), (), {}, "x")
    assert list(bound) == list(tensor_shapes(spec))
    for name, array in ours.items():
        assert bound[name].shape == array.shape
        tolerance = 1e-6 if name.endswith("norm") else 0  # less one and back
        np.testing.assert_allclose(bound[name].read(), array, atol=tolerance, rtol=0)


def refusal(files: Arrays, path: Path, spec: ModelSpec | None = None, **kinds: str) -> str:
    with pytest.raises(SourceError) as caught:
        bind(spec or gpt2_like(), stored(files, path / "t", **kinds), ("wte.old",), {"rope": "a note"}, "x")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("x: tensors do not fit the spec: ")
    return str(caught.value)


def test_names_that_do_not_meet(files: Arrays, tmp_path: Path) -> None:
    for layer in range(2):
        files[f"h.{layer}.attention.w"] = files.pop(f"h.{layer}.attn.w")
    message = refusal(files | {"rope": files["wpe"], "wte.old": files["wpe"]}, tmp_path)
    assert "missing h.{0-1}.attn.w; " in message  # once, though three are read from it
    assert "not read by any block h.{0-1}.attention.w, rope (a note); " in message
    assert "; h.{0-1}.attn.w may be h.{0-1}.attention.w. Give a spec" in message
    assert "wte.old" not in message


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("h.{}.attn.w", (32, 48), "[32, 48], wanted [32, 64] (32 rows of q, 16 rows of k, 16 rows of v)"),
        ("h.{}.attn.b", (32,), "[32], wanted [64] (32 rows of q, 16 rows of k, 16 rows of v)"),
        ("h.{}.mlp", (48, 32), "[48, 32], wanted [96, 32] (48 rows of up, 48 rows of gate)"),
        ("layers.{}.down", (48, 32), "[48, 32], wanted [32, 48]"),
    ],
)
def test_shapes(name: str, shape: tuple[int, ...], reason: str, files: Arrays, tmp_path: Path) -> None:
    for layer in range(2):
        files[name.format(layer)] = np.zeros(shape, np.float32)
    message = refusal(files, tmp_path)
    assert f"shape of {name.format('{0-1}')} is {reason}. " in message
    assert message.count("shape") == 1


def test_the_shape_of_what_has_rows_to_skip(files: Arrays, tmp_path: Path) -> None:
    files["wpe"] = files["wpe"][2:]
    message = refusal(files, tmp_path)
    assert "shape of wpe is [128, 32], wanted [130, 32] (2 rows to skip, 128 rows of positions). " in message


def test_sources_that_cannot_be_for_these_shapes(files: Arrays, tmp_path: Path) -> None:
    spec = gpt2_like()
    pieces = {ours: text.replace("by group", "by 3") for ours, text in spec.tensors.items()}
    message = refusal(files, tmp_path, replace(spec, tensors=pieces))
    assert (
        "h.{0-1}.attn.w, h.{0-1}.attn.b cannot be read as the spec says: the rows of q, k, v do not divide" in message
    )
    biases = {f"{LAYER}{x}_bias": "h.{layer}.attn.b | transposed | q k v" for x in "qkv"}
    message = refusal(files, tmp_path, replace(spec, tensors=spec.tensors | biases))
    assert "h.{0-1}.attn.b cannot be read as the spec says: only a matrix can be transposed" in message


def test_types_that_cannot_be_read(files: Arrays, tmp_path: Path) -> None:
    """Each once, though two are read from h.0.mlp."""
    message = refusal(files, tmp_path, **{"h.0.mlp": "I32", "h.1.mlp": "I32", "wpe": "U8"})
    assert f"{list(READABLE)[-1]}; wpe stored as U8, wanted one of F32" in message
    assert "spec: h.{0-1}.mlp stored as I32, wanted one of F32" in message


def test_every_fault_at_once(files: Arrays, tmp_path: Path) -> None:
    del files["embedding"]
    files["h.1.o"] = files["h.1.o"][:8]
    message = refusal(files | {"extra": files["wpe"]}, tmp_path, wpe="I8")
    for part in ("missing embedding", "any block extra", "shape of h.1.o is [8, 32]", "wpe stored as I8"):
        assert part in message


def test_norms_that_are_stored_less_one(files: Arrays, tmp_path: Path) -> None:
    """Weights only: a bias has no one to add."""
    bound = bind(gpt2_like(), stored(files, tmp_path / "t"), (), {}, "x")
    for name in ("final_norm", "layers.1.mlp_norm"):
        np.testing.assert_array_equal(bound[name].read(), files[name] + np.float32(1))
        np.testing.assert_array_equal(bound[f"{name}_bias"].read(), files[f"{name}_bias"])


def test_what_a_quantizer_turned_is_not_turned_again(files: Arrays, tmp_path: Path) -> None:
    class Turned(Tensor):
        @property
        def turned(self) -> bool:
            return True

    tensors = stored(files | {"h.0.o": files["h.0.o"].T}, tmp_path / "t")
    o = tensors["h.0.o"]
    tensors["h.0.o"] = Turned(o.name, o.shape, o.stored, o.offset, o.nbytes, o.file)
    bound = bind(gpt2_like(), tensors, (), {}, "x")
    ours = ours_of(gpt2_like())
    for layer in range(2):
        np.testing.assert_array_equal(bound[f"layers.{layer}.o"].read(), ours[f"layers.{layer}.o"])


def test_a_plain_model_has_no_views(tmp_path: Path) -> None:
    spec = example()
    tensors = stored(ours_of(spec), tmp_path / "t")
    bound = bind(spec, tensors, (), {}, "x")
    assert all(bound[name] is tensors[name] for name in tensor_shapes(spec))
    assert re.search("missing embedding, layers", refusal({"embeding": np.zeros((2, 2), np.float32)}, tmp_path, spec))
