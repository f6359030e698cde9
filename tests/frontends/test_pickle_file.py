"""Pickles that want to run something, to exhaust memory or time, or that are damaged: refused in one line."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SourceError
from llmc.frontends.files import pickle_file
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.files.pickle_file import GLOBALS, MAX_BYTES, Storage, View, read_pickle


def read(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    file = open_mapped(path, 1)
    return read_pickle(file, 0, file.size)[0]


class Gadget:
    """Pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def storage(count: int = 6, kind: str = "torch.FloatStorage", key: bytes | None = None, more: bytes = b"") -> bytes:
    return b"(" + text("storage") + named(kind) + (key or text("0")) + text("cpu") + number(count) + more + b"tQ"


def view(
    saved: bytes | None = None, offset: int = 0, shape: bytes | None = None, strides: bytes | None = None, **more: Any
) -> bytes:
    shape = b"(" + number(2) + number(3) + b"t" if shape is None else shape
    strides = b"(" + number(3) + number(1) + b"t" if strides is None else strides
    name, rest = more.get("name", "torch._utils._rebuild_tensor_v2"), more.get("rest", b"\x89)")
    return named(name) + b"(" + (saved or storage()) + number(offset) + shape + strides + rest + b"tR"


def table(*items: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(items) + b"u."


def test_what_the_cases_below_vary(tmp_path: Path) -> None:
    """So that each of them is refused for its own fault only."""
    path = tmp_path / "x.pkl"
    saved = Storage("0", "F32", 6)
    wanted = {"a": View(saved, 0, (2, 3), (3, 1), "F32")}
    assert read(path, table(text("a") + view())) == wanted
    assert read(path, table(text("a") + view(name="torch._utils._rebuild_tensor", rest=b""))) == wanted
    bytes_ = storage(24, "torch.storage.UntypedStorage")
    third = view(bytes_, name="torch._utils._rebuild_tensor_v3", rest=b"\x89)" + named("torch.uint16"))
    assert read(path, table(text("a") + third)) == {"a": View(Storage("0", "U8", 24), 0, (2, 3), (3, 1), "U16")}
    ordered = b"\x80\x02" + named("collections.OrderedDict")
    assert read(path, ordered + b")R.") == {}
    assert read(path, ordered + b"](](U\1aNe](T\1\0\0\0bK\1ee\x85R.") == {"a": None, "b": 1}
    for protocol in range(2, 6):
        plain = {"a": [1, 255, 65535, -1, 1 << 40, -(1 << 40)], "b": (None, True, False, "é", {}), "c": {"d": ()}}
        assert read(path, pickle.dumps(plain, protocol)) == plain


CALLS = {
    "posix.system": Gadget(os.system, ("touch hit",)),
    "builtins.eval": Gadget(eval, ("1",)),
    "builtins.getattr": Gadget(getattr, ("x", "upper")),
    "posix.listdir": Gadget(os.listdir, (".",)),
    "collections.deque": Gadget(__import__("collections").deque, ([],)),
}


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    known = {name, name.replace("builtins", "__builtin__")}
    for value in (CALLS[name], {"a": CALLS[name]}, [CALLS[name]]):
        with pytest.raises(SourceError) as caught:
            read(tmp_path / "x.pkl", pickle.dumps(value, protocol))
        assert any(f"refers to '{one}'" in str(caught.value) for one in known)
    assert os.listdir(tmp_path) == ["x.pkl"]


U64 = (1 << 64) - 1
BAD: dict[str, tuple[bytes, str]] = {
    "no protocol": (b"}.", "starts with b'}.', wanted a pickle of protocol 2"),
    "protocol 0": (pickle.dumps({"a": 1}, 0), "starts with"),
    "protocol 1": (pickle.dumps({"a": 1}, 1), "starts with"),
    "protocol 6": (b"\x80\x06}.", "protocol 6, wanted 2 to 5"),
    "protocol again": (b"\x80\x02\x80\x02}.", "protocol 2, .* once at the start"),
    "cut": (b"\x80\x02", "1 bytes wanted, but there are 0"),
    "no such opcode": (b"\x80\x02\xff.", "opcode 0xff"),
    "nothing": (b"\x80\x02.", "the stack is empty"),
    "left over": (b"\x80\x02}}.", "1 values are left over"),
    "open mark": (b"\x80\x02}(}.", "values are left over"),
    "no mark": (b"\x80\x02t.", "no mark"),
    "below the mark": (b"\x80\x02}(\x85t.", "the stack is empty"),
    "INST": (b"\x80\x02(ios\nsystem\n.", "opcode INST"),
    "OBJ": (b"\x80\x02(cos\nsystem\no.", "refers to 'os.system'"),
    "NEWOBJ": (b"\x80\x02" + named("torch.FloatStorage") + b")\x81.", "opcode NEWOBJ"),
    "extension": (b"\x80\x02\x82\x01.", "opcode EXT1"),
    "text of a number": (b"\x80\x02I99\n.", "opcode INT"),
    "long text of a number": (b"\x80\x02L" + b"9" * 10**6 + b"L\n.", "opcode LONG,"),
    "LONG4": (b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".", "opcode LONG4"),
    "BINUNICODE8": (b"\x80\x04\x8d" + struct.pack("<Q", U64) + b".", "opcode BINUNICODE8"),
    "out-of-band buffer": (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
    "long text": (b"\x80\x02X" + struct.pack("<I", U64 >> 32) + b".", "4294967295 bytes wanted"),
    "text not UTF-8": (b"\x80\x02X\x01\0\0\0\xff.", "not UTF-8"),
    "remembers nothing": (b"\x80\x02h\x05.", "nothing was remembered as 5"),
    "endless name": (b"\x80\x02c" + b"a" * 10000 + b"\nb\n.", "a name without an end"),
    "module a number": (b"\x80\x04K\x01K\x02\x93.", "refers to '.1, 2.'"),
    "dotted name": (b"\x80\x04" + text("torch") + text("_utils._rebuild_tensor_v2.__globals__") + b"\x93.", "refers"),
    "call of a type": (b"\x80\x02" + named("torch.FloatStorage") + b")R.", "'torch.FloatStorage' of .*, which"),
    "call of a number": (b"\x80\x02K\x01)R.", "1 of ()"),
    "ordered dict of keys": (b"\x80\x02" + named("collections.OrderedDict") + b"]Na\x85R.", "wanted pairs of a key"),
    "ordered dict of None": (b"\x80\x02" + named("collections.OrderedDict") + b"N\x85R.", "wanted pairs of a key"),
    "ordered dict, twice": (
        b"\x80\x02" + named("collections.OrderedDict") + b"](](U\1aNe](U\1aNee\x85R.",
        "'a' appears twice",
    ),
    "ordered dict of two": (b"\x80\x02" + named("collections.OrderedDict") + b"]]\x86R.", "OrderedDict' of"),
    "arguments no tuple": (b"\x80\x02" + named("collections.OrderedDict") + b"]R.", "wanted a tuple"),
    "state of a list": (b"\x80\x02]}b.", "wanted a dict"),
    "state no dict": (b"\x80\x02}Nb.", "state None"),
    "append to a dict": (b"\x80\x02}Na.", "wanted a list"),
    "items of a list": (b"\x80\x02](NNu.", "wanted a dict"),
    "key without value": (table(text("a")), "a key without a value"),
    "key a tuple": (table(b")N"), "key ()"),
    "key a storage": (table(storage() + b"N"), "key Storage"),
    "twice": (table(text("a") + b"N" + text("a") + b"N"), "'a' appears twice"),
    "no storage": (b"\x80\x02" + text("x") + b"Q.", "refers to 'x' outside"),
    "module outside": (b"\x80\x02(" + text("module") + b"NNNNtQ.", "outside the pickle, wanted a storage"),
    "storage of nothing": (b"\x80\x02(" + text("storage") + b"NNNNtQ.", "storage ..storage., None"),
    "storage of a dtype": (b"\x80\x02" + storage(kind="torch.uint16") + b".", "storage ..storage."),
    "storage of a function": (b"\x80\x02" + storage(kind="torch._utils._rebuild_tensor") + b".", "storage ..storage."),
    "negative count": (b"\x80\x02" + storage(-1) + b".", "storage ..storage."),
    "huge count": (b"\x80\x02" + storage(1 << 63) + b".", "storage ..storage."),
    "key of a storage": (b"\x80\x02" + storage(key=b")") + b".", "storage ..storage."),
    "part of a storage": (b"\x80\x02" + storage(more=b")") + b".", "PyTorch before 0.4"),
    "two types": (table(text("a") + storage() + text("b") + storage(kind="torch.HalfStorage")), "two types or sizes"),
    "two sizes": (table(text("a") + storage() + text("b") + storage(7)), "two types or sizes"),
    "tensor of no storage": (b"\x80\x02" + view(b"N") + b".", "_rebuild_tensor_v2 of"),
    "too few arguments": (b"\x80\x02" + view(rest=b"") + b".", "_rebuild_tensor_v2 of"),
    "too many arguments": (b"\x80\x02" + view(rest=b"\x89)NN") + b".", "_rebuild_tensor_v2 of"),
    "metadata": (b"\x80\x02" + view(rest=b"\x89)}" + text("conj") + b"\x88s") + b".", "a tensor with .'conj'"),
    "negative offset": (b"\x80\x02" + view(offset=-1) + b".", "offset -1"),
    "negative stride": (b"\x80\x02" + view(strides=number(-3) + number(1) + b"\x86") + b".", "strides .-3, 1."),
    "negative size": (b"\x80\x02" + view(shape=number(-2) + number(3) + b"\x86") + b".", "shape .-2, 3."),
    "huge size": (b"\x80\x02" + view(shape=number(1 << 63) + number(3) + b"\x86") + b".", "shape .9223372036854775808"),
    "boolean size": (b"\x80\x02" + view(shape=b"\x88\x88\x86") + b".", "shape .True, True."),
    "shape a list": (b"\x80\x02" + view(shape=b"]") + b".", "shape"),
    "fewer strides": (b"\x80\x02" + view(strides=number(1) + b"\x85") + b".", "strides"),
    "many dimensions": (
        b"\x80\x02" + view(shape=b"(" + b"K\1" * 9 + b"t", strides=b"(" + b"K\1" * 9 + b"t") + b".",
        "of",
    ),
    "no dtype": (b"\x80\x02" + view(name="torch._utils._rebuild_tensor_v3", rest=b"\x89)N") + b".", "dtype None"),
    "dtype a function": (
        b"\x80\x02" + view(name="torch._utils._rebuild_tensor_v3", rest=b"\x89)ccollections\nOrderedDict\n") + b".",
        "dtype ",
    ),
    "parameter of nothing": (b"\x80\x02" + named("torch._utils._rebuild_parameter") + b"NNN\x87R.", "_rebuild_param"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_pickles(tmp_path: Path, case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(SourceError, match=message.replace("()", r"\(\)")) as caught:
        read(tmp_path / "bad.pkl", data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert str(caught.value).startswith("bad.pkl: pickle at byte ")


def test_nesting_costs_no_more_than_its_bytes(tmp_path: Path) -> None:
    """Tuples in tuples by the hundred thousand, and 2^100 of them by reference: neither read nor shown in full."""
    path = tmp_path / "x.pkl"
    deep = b"\x80\x02)" + b"\x85" * 300_000
    read(path, deep + b".")
    doubled = b"\x80\x02)" + b"q\x00h\x00\x86" * 100
    read(path, doubled + b".")
    for data in (deep, doubled):
        with pytest.raises(SourceError, match="wanted a dict") as caught:
            read(path, data + b"}b.")
        assert len(str(caught.value)) < 300
        with pytest.raises(SourceError, match="outside the pickle"):
            read(path, data + b"Q.")
    itself = b"\x80\x02]q\x00h\x00a"
    with pytest.raises(SourceError, match="outside the pickle"):
        read(path, itself + b"Q.")


@pytest.mark.parametrize("each", [b"]", b"}", b"N", b"N\x94", b"(", named("torch.FloatStorage")])
def test_a_bomb_of_opcodes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: bytes) -> None:
    monkeypatch.setattr(pickle_file, "MAX_OPCODES", 1 << 17)
    data = b"\x80\x02N" + each * (1 << 17)
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="more than 131072 opcodes"):
            read(tmp_path / "x.pkl", data)
        assert tracemalloc.get_traced_memory()[1] < (1 << 17) * 200 + len(data)  # bytes, for 0.4 GB of all opcodes
    finally:
        tracemalloc.stop()


def test_a_pickle_over_the_limit(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="bytes wanted, but there are"):
        read(tmp_path / "x.pkl", b"\x80\x02" + text("x" * MAX_BYTES) + b".")


PIECES = st.one_of(
    st.sampled_from([bytes([code]) for code in b"(})]t\x85\x86\x87N\x88\x89RbQsuae.\x93\x94"]),
    st.sampled_from(sorted(GLOBALS)).map(named),
    st.text(max_size=3).map(text),
    st.integers(-300, 1 << 65).map(number),
    st.integers(0, 3).map(lambda i: b"h" + bytes([i])),
    st.integers(0, 3).map(lambda i: b"q" + bytes([i])),
    st.just(named("collections.OrderedDict") + b"](](U\1aNee\x85R"),
    st.just(storage()),
    st.just(view()),
    st.binary(max_size=2),
)


KINDS = ("int", "bool", "str", "tuple", "list", "dict", "Storage", "View", "_Global")


@settings(
    max_examples=500,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(PIECES, max_size=30))
def test_any_opcodes(tmp_path: Path, pieces: list[bytes]) -> None:
    """A value of the known kinds or a refusal, whatever the order of opcodes."""
    try:
        value = read(tmp_path / "x.pkl", b"\x80\x02" + b"".join(pieces) + b".")
        assert value is None or type(value).__name__ in KINDS
    except SourceError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
