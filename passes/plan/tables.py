"""Strict reading of the tables of a TOML file: every fault is noted where it is, and all are told at once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from llmc.compiler.errors import LlmcError
from llmc.compiler.spec.fields import clip, near
from llmc.compiler.text_file import parse_toml

LIMIT = 1 << 20  # characters of a file
MOST = 1e15  # of a number
_NAME = re.compile(r"(?:(?:cpu|cuda)(?::\d{1,4})?|\d{1,4})", re.ASCII)


class Table:
    """A table whose keys are taken one by one; those that are left at its end are faults."""

    def __init__(self, values: dict[str, Any], where: str, faults: list[str], at: str = "") -> None:
        self.values, self.where, self.faults, self.at = values, where, faults, at
        self._taken: list[str] = []

    def fault(self, key: str, got: Any, wanted: str) -> None:
        """Note that a key's value is not what was wanted."""
        self.faults.append(f"{self.at}{key} is {got if got == 'nothing' else clip(got)}, wanted {wanted}")

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, whatever it is."""
        self._taken.append(key)
        return self.values.get(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, or from 0 on where the default is 0."""
        value = self.take(key)
        least = "at least 0" if default == 0.0 else "above 0"
        if value is None:
            if default is None:
                self.faults.append(f"{self.at}{key} is missing")
                return 1.0
            return default
        plain = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not plain or not math.isfinite(value) or value < 0 or (value == 0 and default != 0.0) or value > MOST:
            self.fault(key, value, f"a number {least}")
            return 1.0
        return float(value)

    def peek_count(self, key: str) -> int:
        """A count as `count` will give it, without a fault."""
        value = self.values.get(key, 1)
        return value if isinstance(value, int) else 1

    def count(self, key: str) -> int:
        """A whole number from 1 on; 1 where there is none."""
        value = self.take(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 4096:
            self.fault(key, value, "a whole number from 1 to 4096")
            return 1
        return value

    def choice(self, key: str, known: Sequence[str]) -> str:
        """One of some words, the first where there is none."""
        value = self.take(key, known[0])
        if value not in known:
            self.fault(key, value, f"one of {', '.join(known)}")
            return known[0]
        return str(value)

    def name(self, key: str) -> str:
        """A device's name."""
        value = self.take(key)
        text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
        if value is None:
            self.faults.append(f"{self.at}{key} is missing")
        elif not _NAME.fullmatch(text):
            self.fault(key, value, "a number, cpu, cpu:N, cuda or cuda:N")
        return text if _NAME.fullmatch(text) else "0"

    def numbers(self, key: str, known: Sequence[str], needed: bool = True) -> dict[str, float]:
        """A table of positive numbers by some names."""
        value = self.take(key)
        if value is None and not needed:
            return {}
        if not isinstance(value, dict):
            if value is None:
                self.faults.append(f"{self.at}{key} is missing")
            else:
                self.fault(key, value, "a table of numbers")
            return {"f32": 1.0} if needed else {}
        inner = Table(value, self.where, self.faults, f"{self.at}{key}.")
        found = {name: inner.number(name) for name in known if name in value}
        inner.end(known)
        return found

    def table(self, key: str, what: str) -> Table:
        """The table of a key."""
        value = self.take(key)
        if not isinstance(value, dict):
            if value is None:
                self.faults.append(f"[{self.at}{key}] is missing: {what}")
            else:
                self.fault(key, value, f"a table: {what}")
            # What is said of the whole table needs not be said of each of its keys.
            return Table({}, self.where, [], f"{self.at}{key}.")
        return Table(value, self.where, self.faults, f"{self.at}{key}.")

    def tables(self, key: str, what: str) -> list[Table]:
        """The tables of a list, at least one."""
        value = self.take(key)
        if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
            if value is None:
                self.faults.append(f"[[{self.at}{key}]] is missing: {what}")
            else:
                self.fault(key, value, f"tables [[{key}]]: {what}")
            return []
        several = len(value) > 1
        return [
            Table(each, self.where, self.faults, f"{self.at}{key}{f'[{i}]' if several else ''}.")
            for i, each in enumerate(value)
        ]

    def end(self, known: Sequence[str] | None = None) -> None:
        """Note the keys that nobody took."""
        known = self._taken if known is None else known
        self.faults += [
            f"unknown key {self.at}{near(str(key), list(known)).strip(chr(39))}"
            for key in self.values
            if key not in known
        ]

    def refuse(self) -> None:
        """Raise LlmcError where there is a fault."""
        if self.faults:
            raise LlmcError(f"{self.where}: " + "; ".join(self.faults))


def read_table(text: str, where: str) -> Table:
    """The table of a whole TOML text."""
    return Table(parse_toml(text, where, LIMIT), where, [])
