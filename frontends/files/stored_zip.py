"""Where the files of an uncompressed zip archive lie: no file is unpacked, so none can be a bomb.

Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT. Stricter than zip readers are, so that no two of
them can disagree on what is inside: nothing follows the directory, both headers of a file agree, names are unique.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from llmc.compiler.errors import SourceError
from llmc.compiler.spec.fields import clip
from llmc.frontends.files.mapped_file import MappedFile

MAX_ENTRIES = 1 << 17
MAX_DIRECTORY = 32 << 20  # bytes

MAGIC = b"PK\x03\x04"
_END = struct.Struct("<4s4H2LH")  # disks, entries, size and offset of the directory, length of a comment
_LOCATOR = struct.Struct("<4sLQL")  # offset of the end record of zip64
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED = 0x2041  # bits: encrypted, strongly encrypted, masked headers
_FOLDER = 0x10  # bit of the external attributes, from DOS
_IN_ZIP64 = 0xFFFFFFFF


@dataclass(frozen=True)
class _Entry:
    """A line of the directory: where the file's own header is, and how long its data."""

    name: str
    header: int
    nbytes: int


def stored_files(file: MappedFile) -> dict[str, tuple[int, int]]:
    """Names in the archive -> (offset, bytes) of their data. Raises SourceError naming what is wrong."""
    start, size, count = _directory(file)
    if count > MAX_ENTRIES or size > MAX_DIRECTORY:
        raise _fail(file, f"{count} files listed in {size} bytes, wanted {MAX_ENTRIES} in {MAX_DIRECTORY} at most")
    entries = _entries(file, start, size, count)
    places: dict[str, tuple[int, int]] = {}
    free = 0  # first byte that belongs to no file so far
    for entry in sorted(entries, key=lambda entry: entry.header):
        if entry.name in places:
            raise _fail(file, f"{clip(entry.name)} appears twice")
        if entry.header < free:
            raise _fail(file, f"{clip(entry.name)} overlaps the file before it")
        data = _data(file, entry)
        free = data + entry.nbytes
        if free > start:
            raise _fail(file, f"{clip(entry.name)} ends at {free}, wanted before the directory at {start}")
        places[entry.name] = (data, entry.nbytes)
    return places


def _fail(file: MappedFile, problem: str) -> SourceError:
    return SourceError(f"{file.name}: zip archive: {problem}; it is damaged, or not what torch.save writes")


def _unpack(file: MappedFile, layout: struct.Struct, at: int, magic: bytes, what: str) -> tuple[int, ...]:
    """The fields of a record after its magic."""
    fields = layout.unpack(bytes(file.bytes_at(at, layout.size)))
    if fields[0] != magic:
        raise _fail(file, f"no {what} at byte {at}")
    return fields[1:]


def _directory(file: MappedFile) -> tuple[int, int, int]:
    """(offset, bytes, entries) of the directory, which ends where its end record begins."""
    end = file.size - _END.size
    disk, disk_too, here, count, size, start, comment = _unpack(file, _END, end, b"PK\x05\x06", "end record")
    if comment:
        raise _fail(file, f"a comment of {comment} bytes follows its end")
    locator = end - _LOCATOR.size
    if locator >= _END64.size and file.data[locator : locator + 4] == b"PK\x06\x07":
        _, at, _ = _unpack(file, _LOCATOR, locator, b"PK\x06\x07", "zip64 locator")
        end = locator - _END64.size
        if at != end:
            raise _fail(file, f"the zip64 end record is at {at}, wanted {end}")
        record = _unpack(file, _END64, at, b"PK\x06\x06", "zip64 end record")
        short = (disk, disk_too, here, count, size, start)
        _, _, _, disk, disk_too, here, count, size, start = record
        whole = (disk, disk_too, here, count, size, start)
        if any(a not in (b, 0xFFFF, _IN_ZIP64) for a, b in zip(short, whole, strict=True)):
            raise _fail(file, "its two end records disagree")
    if disk or disk_too or here != count:
        raise _fail(file, "it is a part of several")
    if start + size != end:
        raise _fail(file, f"the directory ends at {start + size}, wanted {end}")
    return start, size, count


def _entries(file: MappedFile, start: int, size: int, count: int) -> list[_Entry]:
    entries = []
    at, end = start, start + size
    for _ in range(count):
        fields = _unpack(file, _ENTRY, at, b"PK\x01\x02", "directory entry")
        flags, method = fields[2:4]
        packed, nbytes, name_bytes, extra_bytes, comment_bytes, disk = fields[7:13]
        attributes, header = fields[14:]
        rest = bytes(file.bytes_at(at + _ENTRY.size, name_bytes + extra_bytes))
        name = _name(file, rest[:name_bytes])
        packed, nbytes, header = _wide(file, name, rest[name_bytes:], packed, nbytes, header)
        if flags & _ENCRYPTED:
            raise _fail(file, f"{clip(name)} is encrypted")
        if method or packed != nbytes:
            raise _fail(file, f"{clip(name)} is compressed (method {method}), wanted files stored as they are")
        if disk or attributes & _FOLDER:  # torch gives a folder's tensor whatever was in memory
            raise _fail(file, f"{clip(name)} is {'a folder' if attributes & _FOLDER else 'in another archive'}")
        entries.append(_Entry(name, header, nbytes))
        at += _ENTRY.size + name_bytes + extra_bytes + comment_bytes
    if at != end:
        raise _fail(file, f"its directory of {count} files ends at {at}, wanted {end}")
    return entries


def _name(file: MappedFile, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _fail(file, f"file name {clip(raw)} is not UTF-8") from None
    plain = name.isprintable() and not set(name) & set("\\:")
    if not plain or not set(name.split("/")).isdisjoint({"", ".", ".."}):
        raise _fail(file, f"file name {clip(name)}, wanted a path in the archive")
    return name


def _wide(file: MappedFile, name: str, extra: bytes, packed: int, nbytes: int, header: int) -> tuple[int, int, int]:
    """The sizes and the offset, from the zip64 field of `extra` where they do not fit into 32 bits."""
    fields = {"nbytes": nbytes, "packed": packed, "header": header}  # in the order of the zip64 field
    wanted = [key for key, value in fields.items() if value == _IN_ZIP64]
    at = 0
    while wanted and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1 and length >= 8 * len(wanted) and at + 4 + length <= len(extra):
            fields |= zip(wanted, struct.unpack_from(f"<{len(wanted)}Q", extra, at + 4), strict=True)
            return fields["packed"], fields["nbytes"], fields["header"]
        at += 4 + length
    if wanted:
        raise _fail(file, f"{clip(name)} has no zip64 sizes")
    return packed, nbytes, header


def _data(file: MappedFile, entry: _Entry) -> int:
    """Where the data begins: after the file's own header, which must tell the same name and method."""
    fields = _unpack(file, _LOCAL, entry.header, MAGIC, f"header of {clip(entry.name)}")
    _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = fields
    at = entry.header + _LOCAL.size
    name = bytes(file.bytes_at(at, name_bytes))
    if name != entry.name.encode() or method or flags & _ENCRYPTED:
        raise _fail(file, f"{clip(entry.name)} is {clip(name)}, method {method}, in its own header")
    return at + name_bytes + extra_bytes
