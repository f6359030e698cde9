"""Reads the pickle that `torch.save` writes of tensors: a machine of the opcodes it needs, and no others.

Nothing is imported and nothing of the file's choice is called. A global is a name; those in GLOBALS stand for
descriptions (a storage, a view of one), every other is refused by name. Opcodes as in Python's pickletools, protocols 2
to 5; what torch pickles is in torch/serialization.py (`_save`, `_legacy_save`) and torch/_utils.py (`_rebuild_*`).
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile

MAX_BYTES = 32 << 20  # of one pickle: the opcodes of 46,000 tensors with names of 500 bytes
MAX_OPCODES = 1 << 21  # about 45 stand for a tensor; bounds time to seconds and memory to some hundred MB
MAX_DIMS = 8
MAX_COUNT = 1 << 63  # sizes, offsets and strides are below it
PROTOCOLS = range(2, 6)

# torch's name of a storage -> how its values are stored, as tensor.py and safetensors_file.py call it.
STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
# Types without a storage of their own, which `_rebuild_tensor_v3` names.
DTYPES = {"uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_UNTYPED = "U8"

_ORDERED_DICT = "collections.OrderedDict"
_PARAMETER = "torch._utils._rebuild_parameter"
_REBUILD = "torch._utils._rebuild_tensor"
GLOBALS = (
    {f"torch.{name}": stored for name, stored in STORAGES.items()}
    | {f"torch.{name}": stored for name, stored in DTYPES.items()}
    | {"torch.storage.UntypedStorage": _UNTYPED, "torch.UntypedStorage": _UNTYPED}
    | dict.fromkeys((_ORDERED_DICT, _PARAMETER, _REBUILD, f"{_REBUILD}_v2", f"{_REBUILD}_v3"), "")
)


@dataclass(frozen=True)
class Storage:
    """A run of `count` values, somewhere else in the file under `key`."""

    key: str
    stored: str
    count: int


@dataclass(frozen=True)
class View:
    """A tensor: value i, j of it is value `offset + i * strides[0] + j * strides[1]` of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stored: str  # the storage's, but for those that are only bytes


@dataclass(frozen=True)
class _Global:
    """The name of something in Python that the pickle refers to."""

    name: str


@dataclass
class _Machine:
    """What a pickle does to a stack. Every method checks what it takes, the file may hold anything."""

    file: MappedFile
    start: int
    at: int
    end: int
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # heights of the stack
    memo: dict[int, Any] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)

    def fail(self, problem: str) -> SourceError:
        return SourceError(f"{self.file.name}: pickle at byte {self.at}: {_one_line(problem)}")

    def damaged(self, problem: str) -> SourceError:
        return self.fail(f"{problem}; the file is damaged, fetch it again")

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise self.damaged(f"{count} bytes wanted, but there are {self.end - self.at}")
        self.at += count
        return self.file.data[self.at - count : self.at]

    def number(self, layout: str) -> int:
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def line(self) -> str:
        until = self.file.data.find(b"\n", self.at, min(self.end, self.at + 256))
        if until < 0:
            raise self.damaged("a name without an end")
        return self.text(self.take(until + 1 - self.at)[:-1])

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged("text that is not UTF-8") from None

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.damaged("the stack is empty")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise self.damaged("no mark on the stack")
        height = self.marks.pop()
        values = self.stack[height:]
        del self.stack[height:]
        return values

    def top(self, kind: type) -> Any:
        value = self.pop()
        if not isinstance(value, kind):
            raise self.damaged(f"{clip(value)}, wanted a {kind.__name__}")
        self.push(value)
        return value

    def remember(self, index: int) -> None:
        value = self.pop()
        self.push(value)
        self.memo[index] = value

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise self.damaged(f"nothing was remembered as {index}")
        self.push(self.memo[index])

    def add_items(self, values: list[Any]) -> None:
        table = self.top(dict)
        if len(values) % 2:
            raise self.damaged("a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):
                raise self.fail(f"key {clip(key)}, wanted the name of a tensor")
            if key in table:
                raise self.damaged(f"key {clip(key)} appears twice")
            table[key] = value

    def add_global(self, module: Any, name: Any) -> None:
        path = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else clip((module, name))
        if path not in GLOBALS:
            raise self.fail(
                f"refers to {clip(path)}; llmc reads files of plain tensors and runs nothing in them. "
                "If you trust the file, save its tensors with safetensors"
            )
        self.push(_Global(path))

    def protocol(self) -> None:
        number = self.number("<B")
        if self.at != self.start + 2 or number not in PROTOCOLS:
            raise self.fail(f"protocol {number}, wanted {PROTOCOLS[0]} to {PROTOCOLS[-1]}, once at the start")

    def build(self) -> None:
        """The attributes of an OrderedDict: `_metadata`, versions of modules, which say nothing about weights."""
        state = self.pop()
        self.top(dict)
        if not isinstance(state, dict):
            raise self.damaged(f"state {clip(state)}, wanted a dict")

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        name = called.name if isinstance(called, _Global) else None
        if not isinstance(arguments, tuple):
            raise self.damaged(f"arguments {clip(arguments)}, wanted a tuple")
        if name == _ORDERED_DICT and len(arguments) <= 1:
            self.push({})
            self.add_items(self.pairs(*arguments))
        elif name == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], View):
            self.push(arguments[0])
        elif name is not None and name.startswith(_REBUILD):
            self.push(self.view(name, arguments))
        else:
            raise self.damaged(f"{clip(name or called)} of {clip(arguments)}, which llmc does not know")

    def pairs(self, pairs: Any = ()) -> list[Any]:
        """Keys and values by turns, from the list of pairs that Python 2 saves an OrderedDict by."""
        if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise self.damaged(f"items {clip(pairs)}, wanted pairs of a key and a value")
        return [value for pair in pairs for value in pair]

    def view(self, name: str, arguments: tuple[Any, ...]) -> View:
        """A tensor from (storage, offset, shape, strides, requires_grad, hooks[, dtype][, metadata])."""
        fields = {_REBUILD: 4, f"{_REBUILD}_v2": 6, f"{_REBUILD}_v3": 7}[name]
        storage, offset, shape, strides = arguments[:4] if len(arguments) >= 4 else (None,) * 4
        if len(arguments) not in (fields, fields + 1) or not isinstance(storage, Storage):
            raise self.damaged(f"{name} of {clip(arguments)}")
        if len(arguments) > fields and arguments[fields]:
            raise self.fail(f"a tensor with {clip(arguments[fields])}, which llmc does not know")
        dims = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides) <= MAX_DIMS
        if not dims or not all(map(_whole, (offset, *shape, *strides))):
            raise self.damaged(f"a tensor of shape {clip(shape)}, strides {clip(strides)}, offset {clip(offset)}")
        stored = storage.stored
        if name.endswith("_v3"):
            stored = GLOBALS[arguments[6].name] if isinstance(arguments[6], _Global) else ""
            if not stored:
                raise self.damaged(f"dtype {clip(arguments[6])}")
        return View(storage, offset, shape, strides, stored)

    def storage(self) -> None:
        """What is saved outside the pickle: ("storage", type, key, device, count[, None])."""
        id_ = self.pop()
        if not isinstance(id_, tuple) or len(id_) not in (5, 6) or id_[0] != "storage":
            raise self.fail(f"refers to {clip(id_)} outside the pickle, wanted a storage")
        if len(id_) == 6 and id_[5] is not None:
            raise self.fail("a storage that is a part of another, as PyTorch before 0.4 wrote; save the model again")
        kind, key, count = id_[1], id_[2], id_[4]
        stored = GLOBALS[kind.name] if isinstance(kind, _Global) and kind.name.endswith("Storage") else None
        if stored is None or not isinstance(key, str) or not _whole(count):
            raise self.damaged(f"storage {clip(id_)}")
        storage = Storage(key, stored, count)
        if self.storages.setdefault(key, storage) != storage:
            raise self.damaged(f"storage {clip(key)} has two types or sizes")
        self.push(storage)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT


def _one_line(text: str) -> str:
    """A message, on one line of bearable length."""
    return text if text.isprintable() and len(text) < 500 else clip(text)


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def make(m: _Machine) -> None:
        m.push(tuple([m.pop() for _ in range(count)][::-1]))

    return make


def _frame(m: _Machine) -> None:
    """Only says how many bytes a reader should fetch at once."""
    m.number("<Q")


def _append(m: _Machine) -> None:
    value = m.pop()
    m.top(list).append(value)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.add_items([key, value])


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    m.add_global(module, name)


def _append_all(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.top(list).extend(values)


def _long(m: _Machine) -> None:
    m.push(int.from_bytes(m.take(m.number("<B")), "little", signed=True))


def _global(m: _Machine) -> None:
    module = m.line()
    m.add_global(module, m.line())


_OPCODES: dict[int, Callable[[_Machine], None]] = {
    ord(code): action
    for code, action in {
        "\x80": _Machine.protocol,
        "\x95": _frame,
        "(": lambda m: m.marks.append(len(m.stack)),
        "}": lambda m: m.push({}),
        "]": lambda m: m.push([]),
        ")": lambda m: m.push(()),
        "t": lambda m: m.push(tuple(m.pop_to_mark())),
        "\x85": _tuple_of(1),
        "\x86": _tuple_of(2),
        "\x87": _tuple_of(3),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "J": lambda m: m.push(m.number("<i")),
        "K": lambda m: m.push(m.number("<B")),
        "M": lambda m: m.push(m.number("<H")),
        "\x8a": _long,
        "X": lambda m: m.push(m.text(m.take(m.number("<I")))),
        "\x8c": lambda m: m.push(m.text(m.take(m.number("<B")))),
        "U": lambda m: m.push(m.text(m.take(m.number("<B")))),  # texts of Python 2
        "T": lambda m: m.push(m.text(m.take(m.number("<I")))),
        "q": lambda m: m.remember(m.number("<B")),
        "r": lambda m: m.remember(m.number("<I")),
        "\x94": lambda m: m.remember(len(m.memo)),
        "h": lambda m: m.recall(m.number("<B")),
        "j": lambda m: m.recall(m.number("<I")),
        "c": _global,
        "\x93": _stack_global,
        "R": _Machine.reduce,
        "b": _Machine.build,
        "Q": _Machine.storage,
        "s": _set_item,
        "u": lambda m: m.add_items(m.pop_to_mark()),
        "a": _append,
        "e": _append_all,
    }.items()
}
_PROTO, _STOP = 0x80, ord(".")
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


def read_pickle(file: MappedFile, start: int, end: int) -> tuple[Any, int, dict[str, Storage]]:
    """The value of the pickle at `start`, where it ends (at most at `end`), and the storages it refers to by key.

    Values are int, bool, None, str, tuple, list, dict, Storage, View, and names of GLOBALS. Raises SourceError for
    all else.
    """
    machine = _Machine(file, start, start, min(end, start + MAX_BYTES))
    if start < end and file.data[start] != _PROTO:
        first = file.data[start : start + 4]
        raise machine.fail(f"starts with {first!r}, wanted a pickle of protocol 2 to 5, which torch.save writes")
    for _ in range(MAX_OPCODES):
        code = machine.take(1)[0]
        if code == _STOP:
            value = machine.pop()
            if machine.stack or machine.marks:
                raise machine.damaged(f"{len(machine.stack)} values are left over")
            return value, machine.at, machine.storages
        action = _OPCODES.get(code)
        if action is None:
            raise machine.fail(
                f"opcode {_NAMES.get(code, hex(code))}, which a file of tensors does not need; "
                "it is damaged, or not what torch.save writes of a model's tensors"
            )
        action(machine)
    raise machine.fail(f"more than {MAX_OPCODES} opcodes")
