"""pyproject.toml's hand-kept package list, and the links for the type checker, match the disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import llmc

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDERS = ("compiler", "frontends", "passes", "runtime", "targets")


@pytest.fixture(scope="module")
def settings(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_on_disk_is_listed(root: Path, settings: dict[str, Any]) -> None:
    folders = settings["tool"]["setuptools"]["package-dir"]
    found = {
        init.parent.relative_to(root).as_posix() for folder in FOLDERS for init in (root / folder).rglob("__init__.py")
    }
    assert set(folders.values()) == found
    assert sorted(folders) == sorted(settings["tool"]["setuptools"]["packages"])


def test_every_python_file_is_in_a_package(root: Path) -> None:
    stray = [
        str(path.relative_to(root))
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert stray == []


def test_the_type_checker_sees_every_file_of_the_facade(root: Path) -> None:
    links = root / "tests" / "typing" / "llmc"
    want = {f: f"../../../{f}" for f in FOLDERS} | {
        path.name: f"../../../compiler/llmc/{path.name}"
        for path in (root / "compiler" / "llmc").iterdir()
        if path.is_file()
    }
    found = {path.name: os.readlink(path) for path in links.iterdir() if path.name != "__pycache__"}
    assert found == want


def test_the_version_is_said_once(settings: dict[str, Any]) -> None:
    assert settings["project"]["version"] == llmc.__version__


def test_the_changelog_has_this_version(root: Path) -> None:
    assert f"## {llmc.__version__}" in (root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_public_name_of_the_facade_exists() -> None:
    for name in llmc.__all__:
        assert getattr(llmc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        llmc.lode  # noqa: B018 - the access is the test
