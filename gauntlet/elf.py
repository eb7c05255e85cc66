"""Reads what the dynamic loader would read of a 64-bit little-endian shared object, without loading it.

Only the program headers and the dynamic table count, because those are what ld.so obeys; section headers may
lie. Layouts: System V ABI, "Object Files" and "Dynamic Linking"; GNU hash table as in glibc's
elf/dl-lookup.c.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MACHINES = {62: "x86_64", 183: "aarch64"}
_PT_LOAD, _PT_DYNAMIC, _PT_RELRO = 1, 2, 0x6474E552
_EXECUTE, _WRITE = 1, 2
_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _INIT, _FINI = 1, 5, 6, 10, 12, 13
_INIT_ARRAY, _INIT_ARRAYSZ, _PREINIT_ARRAY, _GNU_HASH, _HASH = 25, 27, 32, 0x6FFFFEF5, 4
_RPATH, _RUNPATH = 15, 29
_WEAK = 2
MAX_SYMBOLS = 1 << 16


class Malformed(ValueError):
    """The bytes are not a shared object that can be read safely."""


@dataclass(frozen=True)
class SharedObject:
    """`imports`: strong undefined symbols; `weak`: weak ones; `exports`: defined, with their dynamic symbol
    type (2 is a function). `constructors`: whether loading runs code. `search`: whether it names its own
    library paths. `state`: bytes of writable memory beyond what the loader itself fills in (addresses of
    imports).
    """

    machine: str
    needed: tuple[str, ...]
    imports: frozenset[str]
    weak: frozenset[str]
    exports: dict[str, int]
    constructors: bool
    search: bool
    state: int


@dataclass(frozen=True)
class _Image:
    data: bytes
    loads: tuple[tuple[int, int, int], ...]

    def at(self, address: int) -> int:
        """File offset of a virtual address."""
        for start, offset, size in self.loads:
            if start <= address < start + size:
                return offset + address - start
        raise Malformed(f"address {address:#x} is in no segment")

    def take(self, layout: str, offset: int) -> tuple[int, ...]:
        if offset < 0 or offset + struct.calcsize(layout) > len(self.data):
            raise Malformed("a table runs past the end of the file")
        return struct.unpack_from(layout, self.data, offset)

    def text(self, offset: int) -> str:
        end = self.data.find(b"\0", offset)
        if offset < 0 or end < 0 or end - offset > 4096:
            raise Malformed("a name runs past the end of the file")
        return self.data[offset:end].decode("utf-8", "replace")


def read(data: bytes) -> SharedObject:
    """Raises `Malformed`."""
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise Malformed("not a 64-bit little-endian ELF file")
    kind, machine, _, _, table, _, _, _, entry_size, count = struct.unpack_from("<HHIQQQIHHH", data, 16)
    if kind != 3 or machine not in MACHINES or entry_size != 56 or count > 64:
        raise Malformed("not a shared object of a known machine")
    raw = _Image(data, ())
    headers = [raw.take("<IIQQQQQQ", table + 56 * i) for i in range(count)]
    loads = tuple((h[3], h[2], h[5]) for h in headers if h[0] == _PT_LOAD)
    image = _Image(data, loads)
    dynamic = [h for h in headers if h[0] == _PT_DYNAMIC]
    if len(dynamic) != 1:
        raise Malformed("not exactly one dynamic table")
    tags = _tags(image, dynamic[0][2], dynamic[0][5])
    strings = image.at(_one(tags, _STRTAB))
    imports, weak, exports = _symbols(image, tags, strings)
    needed = tuple(image.text(strings + v) for v in tags.get(_NEEDED, []))
    runs = _INIT in tags or _PREINIT_ARRAY in tags or any(tags.get(_INIT_ARRAYSZ, []))
    state = _state(headers, len(imports) + len(weak))
    return SharedObject(
        MACHINES[machine], needed, imports, weak, exports, runs, _RPATH in tags or _RUNPATH in tags, state
    )


def _state(headers: list[tuple[int, ...]], imported: int) -> int:
    """Writable bytes after loading: those that are not made read-only again, less one address per import."""
    if any(h[0] == _PT_LOAD and h[1] & _WRITE and h[1] & _EXECUTE for h in headers):
        raise Malformed("a segment is writable and executable")
    writable = sum(h[6] for h in headers if h[0] == _PT_LOAD and h[1] & _WRITE)
    closed = sum(h[6] for h in headers if h[0] == _PT_RELRO)
    return max(0, writable - closed - 8 * imported)


def _tags(image: _Image, offset: int, size: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i in range(min(size // 16, 256)):
        tag, value = image.take("<qQ", offset + 16 * i)
        if tag == 0:
            return found
        found.setdefault(tag, []).append(value)
    raise Malformed("the dynamic table does not end")


def _one(tags: dict[int, list[int]], tag: int) -> int:
    if len(tags.get(tag, [])) != 1:
        raise Malformed(f"not exactly one dynamic entry {tag}")
    return tags[tag][0]


def _symbols(
    image: _Image, tags: dict[int, list[int]], strings: int
) -> tuple[frozenset[str], frozenset[str], dict[str, int]]:
    table = image.at(_one(tags, _SYMTAB))
    imports, weak, exports = set(), set(), {}
    for i in range(1, _count(image, tags)):
        name, info, _, section, _, _ = image.take("<IBBHQQ", table + 24 * i)
        text = image.text(strings + name)
        if section:
            exports[text] = info & 15
        elif text:
            (weak if info >> 4 == _WEAK else imports).add(text)
    return frozenset(imports), frozenset(weak), exports


def _count(image: _Image, tags: dict[int, list[int]]) -> int:
    """Number of dynamic symbols: DT_HASH says it, otherwise the longest chain of DT_GNU_HASH does."""
    if _HASH in tags:
        return min(image.take("<II", image.at(_one(tags, _HASH)))[1], MAX_SYMBOLS)
    base = image.at(_one(tags, _GNU_HASH))
    buckets, first, bloom, _ = image.take("<IIII", base)
    if buckets > MAX_SYMBOLS or bloom > MAX_SYMBOLS:
        raise Malformed("hash table too large")
    start = base + 16 + 8 * bloom
    last = max(image.take(f"<{buckets}I", start), default=0)
    if last < first:
        return first
    chain = start + 4 * buckets
    while last < MAX_SYMBOLS and not image.take("<I", chain + 4 * (last - first))[0] & 1:
        last += 1
    return last + 1
