"""Zip archives that lie about what is in them."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc.compiler.errors import SourceError
from llmc.frontends.files.mapped_file import open_mapped
from llmc.frontends.files.stored_zip import stored_files


def archive(*names: str, compression: int = zipfile.ZIP_STORED, comment: bytes = b"", wide: bool = False) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", compression) as file:
        warnings.simplefilter("ignore")  # names that appear twice
        for name in names or ("x/a", "x/b"):
            with file.open(zipfile.ZipInfo(name), "w", force_zip64=wide) as entry:
                entry.write(b"0123456789" * 10)
        file.comment = comment
    data = buffer.getvalue()
    if compression:  # ZipInfo of its own is stored
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", compression) as file:
            file.writestr("x/a", bytes(1 << 20))
        data = buffer.getvalue()
    return data


def read(path: Path, data: bytes) -> dict[str, bytes]:
    path.write_bytes(data)
    return {name: data[at : at + count] for name, (at, count) in stored_files(open_mapped(path, 1)).items()}


def patched(data: bytes, magic: bytes, at: int, layout: str, value: int, which: int = 0) -> bytes:
    """`data` with a number in the `which`-th record of this magic changed."""
    place = -1
    for _ in range(which + 1):
        place = data.index(magic, place + 1)
    place += at
    return data[:place] + struct.pack(layout, value) + data[place + struct.calcsize(layout) :]


LOCAL, ENTRY, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"


def test_files_are_found(tmp_path: Path) -> None:
    content = b"0123456789" * 10
    for wide in (False, True):
        assert read(tmp_path / "x.zip", archive(wide=wide)) == {"x/a": content, "x/b": content}
    assert read(tmp_path / "x.zip", archive("ü/é")) == {"ü/é": content}


def test_sizes_in_the_zip64_field(tmp_path: Path) -> None:
    """What a directory of files over 4 GB looks like."""
    data = archive("x/a")
    entry, end = data.index(ENTRY), data.index(END)
    for key in (20, 24, 42):  # packed size, size, offset of the header
        data = patched(data, ENTRY, key, "<L", 0xFFFFFFFF)
    extra = struct.pack("<2HB", 0x4242, 1, 7) + struct.pack("<2H3Q", 1, 24, 100, 100, 0)
    data = patched(data, ENTRY, 30, "<H", len(extra))
    data = data[:end] + extra + data[end:]
    size = end + len(extra) - entry
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, entry)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end + len(extra), 1)
    cut = end + len(extra)
    wide = data[:cut] + record + locator + patched(data[cut:], END, 12, "<L", 0xFFFFFFFF)
    assert list(read(tmp_path / "x.zip", wide)) == ["x/a"]
    cases = {
        "wanted": wide.replace(locator, struct.pack("<4sLQL", b"PK\6\7", 0, 5, 1)),
        "two end records disagree": patched(wide, END, 12, "<L", 5),
        "no zip64 end record": wide.replace(b"PK\6\6", b"PK\0\0"),
        "no zip64 sizes": wide.replace(extra[5:7], b"\2\0"),
        "but the file has": wide.replace(struct.pack("<3Q", 100, 100, 0), struct.pack("<3Q", 100, 100, 1 << 63)),
        "ends at": wide.replace(struct.pack("<3Q", 100, 100, 0), struct.pack("<3Q", 1 << 40, 1 << 40, 0)),
    }
    for message, bad in cases.items():
        with pytest.raises(SourceError, match=message):
            read(tmp_path / "x.zip", bad)


CASES: dict[str, tuple[bytes, str]] = {
    "nothing": (bytes(100), "no end record"),
    "short": (b"PK\3\4", "22 bytes at -18"),
    "cut": (archive()[:-1], "no end record"),
    "rest": (archive() + b"x", "no end record"),
    "comment": (archive(comment=b"hello"), "no end record"),
    "comment that is not there": (patched(archive(), END, 20, "<H", 5), "a comment of 5 bytes"),
    "deflated": (archive(compression=zipfile.ZIP_DEFLATED), "'x/a' is compressed .method 8."),
    "bzip2": (archive(compression=zipfile.ZIP_BZIP2), "method 12"),
    "lzma": (archive(compression=zipfile.ZIP_LZMA), "method 14"),
    "two sizes": (patched(archive(), ENTRY, 20, "<L", 99), "compressed"),
    "encrypted": (patched(archive(), ENTRY, 8, "<H", 1), "encrypted"),
    "strongly encrypted": (patched(archive(), ENTRY, 8, "<H", 0x41), "encrypted"),
    "hidden headers": (patched(archive(), ENTRY, 8, "<H", 0x2000), "encrypted"),
    "other method in its header": (patched(archive(), LOCAL, 8, "<H", 8), "'x/a' is b'x/a', method 8"),
    "encrypted in its header": (patched(archive(), LOCAL, 6, "<H", 1), "in its own header"),
    "other name in its header": (archive().replace(b"x/a", b"x/z", 1), "'x/a' is b'x/z'"),
    "twice": (archive("x/a", "x/a"), "appears twice"),
    "parent": (archive("../a"), "'../a', wanted a path"),
    "parent inside": (archive("x/../a"), "wanted a path"),
    "absolute": (archive("/etc/passwd"), "wanted a path"),
    "drive": (archive("C:/a"), "wanted a path"),
    "backslash": (archive().replace(b"x/a", b"x\\a"), "wanted a path"),
    "folder": (archive("x/"), "wanted a path"),
    "marked as a folder": (patched(archive(), ENTRY, 38, "<L", 0x36), "'x/a' is a folder"),
    "not UTF-8": (archive().replace(b"x/a", b"x/\xff"), "not UTF-8"),
    "control characters": (archive("x/\x1b[2J"), r"\\x1b"),
    "same place": (patched(archive(), ENTRY, 42, "<L", 0, 1), "overlaps|is b'x/a'"),
    "into the next": (patched(patched(archive(), ENTRY, 20, "<L", 140), ENTRY, 24, "<L", 140), "overlaps"),
    "past the directory": (
        patched(patched(archive(), ENTRY, 20, "<L", 140, 1), ENTRY, 24, "<L", 140, 1),
        "wanted before the directory",
    ),
    "header outside": (patched(archive(), ENTRY, 42, "<L", 10**8), "but the file has"),
    "header elsewhere": (patched(archive(), ENTRY, 42, "<L", 5), "no header of 'x/a' at byte 5"),
    "other archive": (patched(archive(), ENTRY, 34, "<H", 1), "in another archive"),
    "part of several": (patched(archive(), END, 4, "<H", 1), "part of several"),
    "fewer files": (patched(patched(archive(), END, 8, "<H", 1), END, 10, "<H", 1), "directory of 1 files ends"),
    "more files": (patched(patched(archive(), END, 8, "<H", 3), END, 10, "<H", 3), "46 bytes at 364"),
    "counts": (patched(archive(), END, 10, "<H", 1), "part of several"),
    "directory elsewhere": (patched(archive(), END, 16, "<L", 1), "the directory ends at"),
    "huge directory": (patched(archive(), END, 12, "<L", 1 << 31), "the directory ends at"),
}


@pytest.mark.parametrize("case", CASES)
def test_lies_in_the_headers(tmp_path: Path, case: str) -> None:
    data, message = CASES[case]
    with pytest.raises(SourceError, match=message) as caught:
        read(tmp_path / "bad.zip", data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("bad.zip: ")


@settings(
    max_examples=300,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=4)), max_size=3),
    wide=st.booleans(),
    cut=st.integers(0, 10),
)
def test_random_damage(tmp_path: Path, edits: list[tuple[int, bytes]], wide: bool, cut: int) -> None:
    data = bytearray(archive(wide=wide))
    for back, patch in edits:  # from the end, where the directory is
        at = max(0, len(data) - back)
        data[at : at + len(patch)] = patch
    try:
        for content in read(tmp_path / "x.zip", bytes(data[: len(data) - cut % 7])).values():
            assert len(content) <= len(data)
    except SourceError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
