"""The container: one artifact as one file of data, nothing in it executed or extracted.

    b"ESPERART\\x02" | u64 little-endian manifest length | canonical-JSON manifest | u64 length of the sealed
    form | sealed form (library.sealed) | zeros to 64 | blob | zeros | blob ...

Blob offsets count from the first multiple of 64 after what stands before them, so that they do not depend on
its length. One content has exactly one spelling: order and alignment of blobs are fixed, padding is zero,
nothing trails. A container that begins with b"ESPERART\\x01" has no sealed form: those written before there
was one, and those whose launch manifest is malformed. A reader that does not know the form must refuse the
container rather than skip it, since a verdict covers all of its bytes: hence another first word.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from library.canon import canonical_json, parse_json, sha256_hex
from library.errors import fail
from library.sealed import Sealed, seal

MAGIC = b"ESPERART\x01"
SEALED = b"ESPERART\x02"
ALIGN = 64
MAX_MANIFEST_BYTES = 32 << 20
MAX_CONTAINER_BYTES = 1 << 30
FORMAT = "esper-artifact/2"
# Version 1 held the blueprint's text as an object of the canonical manifest, which sorts names.
FORMATS = ("esper-artifact/1", FORMAT)
KINDS = ("cuda", "hip", "cpu")
DETERMINISM = ("deterministic", "library-nondeterministic")
_HEAD = len(MAGIC) + 8
_HEX = re.compile(r"[0-9a-f]+\Z")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.]*(-[a-z0-9_.]+)*\Z")
_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")
_TOP: Mapping[str, type] = {
    "format": str,
    "artifact_id": str,
    "blueprint": dict,
    "target": dict,
    "pipeline": str,
    "objective": str,
    "version": str,
    "toolchain": dict,
    "determinism": str,
    "dims": dict,
    "launch": dict,
    "externs": list,
    "blobs": list,
}
_BLOB_KEYS = {"name", "kind", "offset", "size", "sha256"}


@dataclass(frozen=True)
class Container:
    """An unpacked artifact: the manifest's `text` and `blobs` as views into the one buffer that was verified;
    `sealed` is None where the container has none."""

    text: memoryview
    blobs: Mapping[str, memoryview]
    data: bytes
    sealed: Sealed | None = None

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest, parsed when it is first asked for."""
        return json.loads(bytes(self.text))

    @cached_property
    def head(self) -> Mapping[str, Any]:
        """What choosing and loading ask: "artifact_id", "target", "externs" and "title", the blueprint's
        name."""
        if self.sealed is not None:
            return self.sealed.head
        kept = ("artifact_id", "target", "externs")
        return {**{k: self.manifest[k] for k in kept}, "title": self.manifest["blueprint"]["name"]}


def artifact_id_of(manifest: Mapping[str, Any]) -> str:
    """`<blueprint 12 hex>-<target>-<pipeline>-<version 8 hex>` from the manifest's own fields."""
    blueprint, target = manifest["blueprint"]["id"], manifest["target"]["name"]
    return f"{blueprint[:12]}-{target}-{manifest['pipeline']}-{manifest['version'][:8]}"


def pack(manifest: Mapping[str, Any], blobs: Sequence[tuple[str, str, bytes]]) -> bytes:
    """Container bytes of `manifest` and (name, kind, bytes) blobs; fills "blobs", and "artifact_id" when
    absent.

    Pure: the same arguments give the same bytes. E0733 for a manifest that breaks the grammar.
    """
    filled = dict(manifest)
    table, offset = [], 0
    for name, kind, data in blobs:
        table.append(
            {"name": name, "kind": kind, "offset": offset, "size": len(data), "sha256": sha256_hex(data)}
        )
        offset = _align(offset + len(data))
    filled["blobs"] = table
    if "artifact_id" not in filled:
        filled["artifact_id"] = _checked_id(filled)
    check_manifest(filled)
    text = canonical_json(filled)
    if len(text) > MAX_MANIFEST_BYTES:
        raise fail("E0735", f"manifest of {len(text)} bytes exceeds {MAX_MANIFEST_BYTES}")
    sealed = seal(filled)
    parts = [SEALED if sealed else MAGIC, struct.pack("<Q", len(text)), text]
    if sealed:
        parts += [struct.pack("<Q", len(sealed)), sealed]
    if blobs:
        written = sum(map(len, parts))
        parts.append(b"\0" * (_align(written) - written))
    for index, (_, _, data) in enumerate(blobs):
        last = index + 1 == len(blobs)
        parts += [data, b"" if last else b"\0" * (_align(len(data)) - len(data))]
    return b"".join(parts)


def unpack(data: bytes, *, verified: bool = False) -> Container:
    """Strict reading. `verified` says that a trusted signature covers sha256(data) and that a strict reading
    stood before it: grammar and blob digests are then not computed again, bounds still are. E0732, E0733,
    E0734, E0735.
    """
    if len(data) > MAX_CONTAINER_BYTES:
        raise fail("E0735", f"container of {len(data)} bytes exceeds {MAX_CONTAINER_BYTES}")
    if len(data) < _HEAD or data[: len(MAGIC)] not in (MAGIC, SEALED):
        raise fail("E0732", "not an Esper artifact: wrong magic or truncated header")
    text, end = _section(data, len(MAGIC), "manifest")
    written = memoryview(b"")
    if data.startswith(SEALED):
        written, end = _section(data, end, "sealed form")
        if not written:
            raise fail("E0732", "an empty sealed form")
    if verified and written:
        sealed = Sealed(written)
        found = Container(text, MappingProxyType(_blobs(sealed.head["blobs"], data, end)), data, sealed)
        found.__dict__["head"] = sealed.head
        return found
    manifest = json.loads(bytes(text)) if verified else _checked(text, written)
    views = _blobs(map(_place, manifest["blobs"]), data, end)
    for row in () if verified else manifest["blobs"]:
        if sha256_hex(views[row["name"]]) != row["sha256"]:
            raise fail("E0730", f"blob {row['name']!r} does not match its digest")
    found = Container(text, MappingProxyType(views), data, Sealed(written) if written else None)
    found.__dict__["manifest"] = manifest
    return found


def _checked(text: memoryview, written: memoryview) -> dict[str, Any]:
    manifest = parse_json(text)
    check_manifest(manifest)
    if canonical_json(manifest) != text:
        raise fail("E0733", "manifest is not in canonical form")
    if written and seal(manifest) != written:
        raise fail("E0733", "the sealed form does not say what the manifest says", node="sealed")
    return manifest


def _section(data: bytes, at: int, what: str) -> tuple[memoryview, int]:
    """A text with its length before it, and where it ends."""
    if at + 8 > len(data):
        raise fail("E0732", f"the file ends before the length of its {what}")
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if length > MAX_MANIFEST_BYTES or end > len(data):
        raise fail("E0732", f"{what} length {length} runs past the end of the file or the limit")
    return memoryview(data)[at + 8 : end], end


def _place(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return row["name"], row["offset"], row["size"]


def _blobs(table: Iterable[Sequence[Any]], data: bytes, end: int) -> dict[str, memoryview]:
    """Views by name, of rows (name, offset, size)."""
    view, base = memoryview(data), _align(end)
    found: dict[str, memoryview] = {}
    for name, offset, size in table:
        start = base + offset
        if start != _align(end):
            raise fail("E0732", f"blob {name!r} does not follow the one before it")
        if start + size > len(data):
            raise fail("E0732", f"blob {name!r} runs past the end of the file")
        if data[end:start].strip(b"\0"):
            raise fail("E0732", f"padding before blob {name!r} is not zero")
        found[name] = view[start : start + size]
        end = start + size
    if end != len(data):
        raise fail("E0732", f"{len(data) - end} bytes after the last blob")
    return found


def check_manifest(manifest: Any) -> None:
    """Grammar of the manifest outside "launch" (which `library.launch` types); E0733 names the field."""
    if not isinstance(manifest, dict):
        raise fail("E0733", "manifest is not an object")
    missing, extra = sorted(_TOP.keys() - manifest.keys()), sorted(manifest.keys() - _TOP.keys())
    if missing or extra:
        raise fail("E0733", f"manifest keys missing: {missing}, unknown: {extra}")
    for key, kind in _TOP.items():
        if type(manifest[key]) is not kind:
            raise fail("E0733", f"manifest field {key!r} must be {kind.__name__}", node=key)
    if manifest["format"] not in FORMATS:
        known = " and ".join(FORMATS)
        raise fail("E0706", f"container format {manifest['format'][:80]!r}, this version reads {known}")
    _check_blueprint(manifest["blueprint"], manifest["format"])
    _check_target(manifest["target"])
    for key in ("pipeline", "objective"):
        _want(bool(_NAME.match(manifest[key])), key, "a lower-case name")
    _want(_is_hex(manifest["version"], 64), "version", "64 hexadecimal digits")
    _want(manifest["determinism"] in DETERMINISM, "determinism", f"one of {', '.join(DETERMINISM)}")
    _check_table(manifest["blobs"])
    expected = artifact_id_of(manifest)
    _want(manifest["artifact_id"] == expected, "artifact_id", f"{expected!r}, which its fields spell")


def _checked_id(manifest: dict[str, Any]) -> str:
    try:
        return artifact_id_of(manifest)
    except (KeyError, TypeError) as error:
        raise fail("E0733", f"manifest lacks what its id is made of: {error}") from error


def _check_blueprint(value: dict[str, Any], version: str) -> None:
    _want(
        value.keys() == {"id", "name", "interface", "text"}, "blueprint", "exactly id, name, interface, text"
    )
    _want(_is_hex(value["id"], 64), "blueprint.id", "64 hexadecimal digits")
    _want(
        isinstance(value["name"], str) and len(value["name"]) <= 256,
        "blueprint.name",
        "a text of at most 256",
    )
    _want(_is_hex(value["interface"], None), "blueprint.interface", "hexadecimal")
    text = value["text"]
    if version == FORMAT:
        _want(isinstance(text, str), "blueprint.text", "the text of a JSON object")
        text = parse_json(text.encode())
        canonical_json(text)  # no half characters: it can be written again
    _want(isinstance(text, dict), "blueprint.text", "an object")


def _check_target(value: dict[str, Any]) -> None:
    for key in ("name", "kind", "arch"):
        _want(isinstance(value.get(key), str), f"target.{key}", "a text")
    _want(bool(_NAME.match(value["name"])), "target.name", "a lower-case name")
    _want(value["kind"] in KINDS, "target.kind", f"one of {', '.join(KINDS)}")
    _want(0 < len(value["arch"]) <= 64, "target.arch", "a text of 1 to 64 characters")


def _check_table(table: list[Any]) -> None:
    names: set[str] = set()
    for index, row in enumerate(table):
        where = f"blobs[{index}]"
        _want(isinstance(row, dict) and row.keys() == _BLOB_KEYS, where, f"exactly {sorted(_BLOB_KEYS)}")
        _want(
            isinstance(row["name"], str) and bool(_BLOB.match(row["name"])),
            where,
            "named with [A-Za-z0-9._+-]",
        )
        _want(isinstance(row["kind"], str) and bool(_NAME.match(row["kind"])), where, "of a lower-case kind")
        for key in ("offset", "size"):
            _want(type(row[key]) is int and 0 <= row[key] <= MAX_CONTAINER_BYTES, where, f"with a sane {key}")
        _want(_is_hex(row["sha256"], 64), where, "with a sha256 of 64 digits")
        _want(row["name"] not in names, where, f"unique; {row['name']!r} appears twice")
        names.add(row["name"])


def _is_hex(value: Any, digits: int | None) -> bool:
    return isinstance(value, str) and bool(_HEX.match(value)) and (digits is None or len(value) == digits)


def _want(ok: bool, field: str, what: str) -> None:
    if not ok:
        raise fail("E0733", f"manifest field {field} must be {what}", node=field)


def _align(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


def blueprint_text(manifest: Mapping[str, Any]) -> str:
    """The blueprint's JSON text, its names in the order in which they were given: that of a call."""
    text = manifest["blueprint"]["text"]
    return text if isinstance(text, str) else json.dumps(_ordered(manifest), ensure_ascii=False)


def blueprint_document(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The same, parsed."""
    text = manifest["blueprint"]["text"]
    return json.loads(text) if isinstance(text, str) else _ordered(manifest)


def _ordered(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The text of a version 1 manifest. Its names are sorted; their order is that of the launch interface."""
    text = dict(manifest["blueprint"]["text"])
    place = {name: at for at, (name, _) in enumerate(tensors(manifest))}
    for section in ("inputs", "params", "buffers", "constants"):
        if isinstance(text.get(section), dict):
            ordered = sorted(text[section].items(), key=lambda item: place.get(item[0], len(place)))
            text[section] = dict(ordered)
    return text


def tensors(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, kind) of the tensors of a call, in order, as the launch interface states them; what is malformed
    there is left to whoever runs it.
    """
    interface = manifest["launch"].get("interface")
    inputs = interface.get("inputs") if isinstance(interface, dict) else None
    listed = [spec for spec in inputs if isinstance(spec, dict)] if isinstance(inputs, list) else []
    return [(str(spec.get("name")), str(spec.get("kind"))) for spec in listed]
