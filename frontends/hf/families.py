"""Families of models, by the `model_type` of config.json: each a TOML file in families/, data without code.

A file says what the keys of config.json mean in fields of the spec, and what the family calls its tensors. Names of
keys, tensors and defaults: transformers/models/<model_type>. A file whose name starts with "_" is no family, but what
several are `like`: theirs are its tables with their own keys on top. docs/families.md lists the families.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmc.compiler.errors import SourceError
from llmc.compiler.spec import BLOCKS, OPTIONAL_BLOCKS
from llmc.compiler.spec.fields import clip, near
from llmc.compiler.spec.tensors import TABLE
from llmc.compiler.text_file import parse_toml, read_text
from llmc.frontends.hf.convolutions import Adjusted, Convolutions
from llmc.frontends.hf.experts import ExpertLayers
from llmc.frontends.hf.position_rules import PLAIN_RULES, WINDOW_RULES, Plain, Rope, Windows

FOLDER = Path(__file__).parents[1] / "families"
MAX_FILE = 1 << 16  # characters
DERIVED = "derived"  # the value of `absent` and `null` that stands for the field's row in the table `derived`
FIELDS = {
    f"{block}.{entry.name}" for block, kind in (BLOCKS | OPTIONAL_BLOCKS).items() for entry in dataclasses.fields(kind)
}


@dataclass(frozen=True)
class Number:
    """A key with a number: the field it `sets`, to `value`, a formula over the key's value (see `evaluate`).

    `absent`: what an absent key means, a number or "derived"; without it the key must be there. `null`: likewise for a
    null. `off_if`: a field; a value equal to it means 0. `lowers`: the field, which another key sets, gets no more.
    """

    sets: str
    value: str = "value"
    absent: float | str | None = None
    null: float | str | None = None
    off_if: str = ""
    lowers: bool = False


@dataclass(frozen=True)
class Flag:
    """A key with true or false: the fields it sets."""

    sets: tuple[str, ...]
    absent: bool


@dataclass(frozen=True)
class Activation:
    """The key that names the MLP's activation, and what it is when absent.

    `names`: names that mean something else in this family than in others -> `mlp.activation`.
    """

    key: str
    absent: str
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """When keys of the table `values` have these values (one, or any of a list): what is then on top, or refused.

    And when the config has none of the keys `without`, and null for all of `nulls`.
    """

    when: dict[str, Any]
    without: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    layer_modules: dict[str, Any] = field(default_factory=dict)
    encoder_layer_modules: dict[str, Any] = field(default_factory=dict)
    refused: str = ""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the keys have the values."""
        return all(
            is_one_of(values[key], wanted if isinstance(wanted, list) else [wanted])
            for key, wanted in self.when.items()
        )


@dataclass(frozen=True)
class Family:
    """One family: what its file says.

    `numbers`, `flags`, `activation`, `rope`, `windows`, `plain`, `experts`, `convolutions`, `adjusted`: keys that set
    fields. `values`: key -> its known values, "null" for null, the first of which an absent key means; `cases` say what
    they change. `off`: keys that must be off, and why. `aliases`: key -> the key that it is another name of.
    `nested`: keys with a table, whose keys are written "table.key". `irrelevant`: keys that say nothing about what the
    model computes.

    `settings`: fields that no key says; `derived`: field -> formula, where nothing else sets it.

    `modules` and `layer_modules` (behind `layers`): our names -> the family's modules, with the steps of
    spec/sources.py; of the module's "weight" and "bias" what the model has. One of ours that ends in "_bias", and one
    behind "= ", stands for a whole name. `ignored`: tensors that mean nothing;
    `beyond`: so many layers after the last one mean nothing either, for they predict what follows the next token.
    `stem`: what the names in files of a base model, saved without its head, lack. `older`: ends of names -> what they
    are in older files.

    Of models with an encoder: `encoder_layers`: what `layers` is for its layers, whose modules are `layer_modules` with
    `encoder_layer_modules` on top. `copies`: tensors that repeat the embedding in some files. `own_head`: the head is
    tied unless the files have one that is not the embedding. `languages`: patterns of the tokens that name a language,
    each with a group for its name.

    `sines`: tensors of some files that hold what position.kind "sinusoidal" computes.
    """

    title: str
    layers: str = ""
    stem: str = ""
    numbers: dict[str, Number] = field(default_factory=dict)
    flags: dict[str, Flag] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    off: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, Any] = field(default_factory=dict)
    nested: tuple[str, ...] = ()
    irrelevant: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    layer_modules: dict[str, Any] = field(default_factory=dict)
    encoder_layers: str = ""
    encoder_layer_modules: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    sines: tuple[str, ...] = ()
    own_head: bool = False
    languages: tuple[str, ...] = ()
    beyond: int = 0
    older: dict[str, Any] = field(default_factory=dict)
    activation: Activation | None = None
    rope: Rope | None = None
    windows: Windows | None = None
    plain: Plain | None = None
    experts: ExpertLayers | None = None
    convolutions: Convolutions | None = None
    adjusted: Adjusted | None = None

    def key_of(self, path: str) -> str:
        """The key that sets a field, or the field's own name when none does."""
        return next((key for key, number in self.numbers.items() if number.sets == path), path)

    def tensors(self, cases: tuple[Case, ...] = ()) -> dict[str, str]:
        """Our names -> sources, more than one model may have. `cases` are those that hold."""
        outer, inner, encoder = dict(self.modules), dict(self.layer_modules), dict(self.encoder_layer_modules)
        for case in cases:
            outer |= case.modules
            inner |= case.layer_modules
            encoder |= case.encoder_layer_modules
        tables = [("", "", outer), ("layers.{layer}.", self.layers, inner)]
        if self.encoder_layers:
            tables.append(("encoder.layers.{layer}.", self.encoder_layers, inner | encoder))
        named: dict[str, str] = {}
        for prefix, stem, table in tables:
            for ours, text in table.items():
                module, *steps = text.split(" | ")
                if ours.endswith("_bias") or module.startswith("= "):  # by a name of its own
                    named[prefix + ours] = " | ".join([f"{stem}{module.removeprefix('= ')}", *steps])
                    continue
                flat = [step for step in steps if step not in ("transposed", "normalized")]
                named[prefix + ours] = " | ".join([f"{stem}{module}.weight", *steps])
                if f"{ours}_bias" not in table:
                    named[f"{prefix}{ours}_bias"] = " | ".join([f"{stem}{module}.bias", *flat])
        return named

    def head_name(self) -> str:
        """What the family calls the head."""
        return self.tensors()["head"]


def is_one_of(value: Any, known: Sequence[Any]) -> bool:
    """Whether a value of JSON is one of those in a TOML list, where "null" stands for null; 1 is 1.0, but not true."""
    value = "null" if value is None else value
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known)


def evaluate(formula: str, numbers: Mapping[str, Any]) -> Any:
    """The value of a formula: names and numbers, each maybe a `root` of one, with *, /, + and - from left to right.

    None when a name has no value. Whole numbers stay whole where they divide.

    >>> evaluate("value / root sizes.hidden * 3", {"value": 2, "sizes.hidden": 16})
    1.5
    """
    result: Any = 1
    sign = "*"
    for word in re.split(r" ([*/+-]) ", formula):
        if word in ("*", "/", "+", "-"):
            sign = word
            continue
        name = word.removeprefix("root ")
        factor: Any = int(name) if name.isdigit() else numbers.get(name)
        if factor is None:
            return None
        factor = math.sqrt(factor) if word.startswith("root ") else factor
        whole = isinstance(result, int) and isinstance(factor, int)
        if sign == "*":
            result = result * factor
        elif sign in "+-":
            result = result + factor if sign == "+" else result - factor
        else:
            result = result // factor if whole and result % factor == 0 else result / factor
    return result


def names_in(formula: str) -> list[str]:
    """The names in a formula, in order."""
    words = (word.removeprefix("root ") for word in re.split(r" [*/+-] ", formula))
    return [word for word in words if not word.isdigit()]


def known_families() -> list[str]:
    """Every `model_type` that has a file."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if not path.stem.startswith("_"))


def load_family(model_type: str) -> Family:
    """One of `known_families`. Raises SourceError when its file is not as it has to be, which is our own mistake."""
    where = f"families/{model_type}.toml"
    table = _merged(model_type)
    faults: list[str] = []
    family = _read(Family, table, "", faults)
    if family is not None:
        faults += _wrong_names(family)
    if faults:
        raise SourceError(f"{where}: {'; '.join(faults)}")
    return family


def _merged(name: str) -> dict[str, Any]:
    """A file's table on top of what it is `like`."""
    where = f"families/{name}.toml"
    table = parse_toml(read_text(FOLDER / f"{name}.toml", "a family"), where, MAX_FILE, SourceError)
    below = table.pop("like", None)
    merged = _merged(below) if isinstance(below, str) and below.startswith("_") else {}
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merged[key] | value
        elif isinstance(value, list) and isinstance(merged.get(key), list):
            merged[key] = merged[key] + value
        else:
            merged[key] = value
    return merged


_TEXTS = "a list of texts"
_FITS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda v: isinstance(v, str)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "bool | None": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("a whole number", lambda v: type(v) is int),
    "float": ("a number", lambda v: type(v) in (int, float)),
    "float | str | None": (f"a number or {DERIVED!r}", lambda v: v == DERIVED or type(v) in (int, float)),
    "tuple[str, ...]": (_TEXTS, lambda v: isinstance(v, list) and all(isinstance(one, str) for one in v)),
    "dict[str, Any]": ("a table", lambda v: isinstance(v, dict)),
}
_NESTED: dict[str, type] = {
    "Activation | None": Activation, "Rope | None": Rope, "Windows | None": Windows, "Plain | None": Plain,
    "ExpertLayers | None": ExpertLayers, "Convolutions | None": Convolutions, "Adjusted | None": Adjusted,
}  # fmt: skip
_TABLES: dict[str, tuple[type, str]] = {
    "dict[str, Number]": (Number, "sets"),
    "dict[str, Flag]": (Flag, "sets"),
}


def _read(cls: Any, table: Any, where: str, faults: list[str]) -> Any:
    """A `cls` from a table, None after adding to `faults`."""
    if not isinstance(table, dict):
        faults.append(f"{where} = {clip(table)}, wanted a table")
        return None
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}
    before = len(faults)
    faults += [f"unknown key {where}{near(key, fields)}" for key in table if key not in fields]
    faults += [
        f"missing key {where}{name}"
        for name, entry in fields.items()
        if name not in table and entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    ]
    values = {
        key: _value(str(fields[key].type), value, where + key, faults) for key, value in table.items() if key in fields
    }
    return None if len(faults) > before else cls(**values)


def _value(hint: str, value: Any, where: str, faults: list[str]) -> Any:
    if hint in _NESTED:
        return _read(_NESTED[hint], value, f"{where}.", faults)
    if hint in _TABLES and isinstance(value, dict):
        cls, short = _TABLES[hint]
        return {
            key: _read(cls, entry if isinstance(entry, dict) else {short: entry}, f"{where}.{key}.", faults)
            for key, entry in value.items()
        }
    if hint == "tuple[Case, ...]" and isinstance(value, list):
        return tuple(_read(Case, case, f"{where}.", faults) for case in value)
    wanted, fits = _FITS.get(hint, ("a table", lambda _: False))
    if not fits(value):
        faults.append(f"{where} = {clip(value)}, wanted {wanted}")
    return tuple(value) if isinstance(value, list) else value


def _wrong_names(family: Family) -> list[str]:
    """Fields, formulas, tensors and keys of cases that do not exist."""
    paths = [number.sets for number in family.numbers.values()]
    paths += [path for flag in family.flags.values() for path in flag.sets]
    tables: list[Family | Case] = [family, *family.cases]
    paths += [path for table in tables for path in (*table.settings, *table.derived)]
    formulas = [number.value for number in family.numbers.values()]
    formulas += [str(formula) for table in tables for formula in table.derived.values()]
    paths += [name for formula in formulas for name in names_in(formula) if name != "value"]
    ours = [name for table in tables for name in table.modules]
    ours += [f"layers.{{layer}}.{name}" for table in tables for name in table.layer_modules]
    ours += [f"encoder.layers.{{layer}}.{name}" for table in tables for name in table.encoder_layer_modules]
    keys = [key for case in family.cases for key in case.when]
    faults = [f"unknown field {near(path, FIELDS)}" for path in dict.fromkeys(paths) if path not in FIELDS]
    faults += [f"unknown tensor {near(name, TABLE)}" for name in ours if name not in TABLE]
    faults += [f"when: {near(key, family.values)} is no key of values" for key in keys if key not in family.values]
    for rules, known in ((family.windows, WINDOW_RULES), (family.plain, PLAIN_RULES)):
        if rules and rules.rule not in known:
            faults.append(f"rule = {near(rules.rule, known)}, wanted one of {', '.join(known)}")
    faults += [f"values.{key} is no list" for key, known in family.values.items() if not isinstance(known, list)]
    return faults
