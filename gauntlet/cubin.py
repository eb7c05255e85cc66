"""Reads the parameter table that the driver will use of a kernel in a cubin, without a driver.

A cubin is an ELF file of machine 190; `.nv.info.<entry>` holds attributes, of which KPARAM_INFO (0x17) gives
ordinal, offset and size of one parameter, and CBANK_PARAM_SIZE (0x19) the bytes of all. The layout is not
documented by the vendor; this is what `cuobjdump -elf` prints, checked on cubins of ptxas 12 and 13 for sm_80
to sm_90.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from gauntlet.elf import Malformed

_MACHINE, _NOBITS = 190, 8
_KPARAM_INFO, _CBANK_PARAM_SIZE, _SIZED, _SHORT = 0x17, 0x19, 4, 3
MAX_SECTIONS = 4096
_REFLECTED = re.compile(rb"__CUDA_[A-Z_]+\0+")


@dataclass(frozen=True)
class Parameter:
    """Bytes from the start of the parameter block."""

    offset: int
    size: int


@dataclass(frozen=True)
class Cubin:
    """`arch`: compute capability as a number (90 for sm_90). `kernels`: parameters by entry name, in order.
    `state`: bytes of global variables that outlive a launch.
    """

    arch: int
    kernels: dict[str, tuple[Parameter, ...]]
    state: int


def read(data: bytes) -> Cubin:
    """Raises `gauntlet.elf.Malformed`."""
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise Malformed("not a 64-bit little-endian ELF file")
    machine, flags = struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
    if machine != _MACHINE:
        raise Malformed("not a cubin")
    sections = _sections(data)
    texts = {name.removeprefix(".text.") for name in sections if name.startswith(".text.")}
    infos = {
        name.removeprefix(".nv.info."): body
        for name, body in sections.items()
        if name.startswith(".nv.info.")
    }
    kernels = {name: _parameters(infos[name]) for name in sorted(texts & infos.keys())}
    return Cubin(flags & 0xFF, kernels, _state(data))


def _state(data: bytes) -> int:
    """Bytes of `.nv.global` and `.nv.global.init`: device variables, which kernels have no use for. The names
    by which libdevice asks for compile options stay behind as such variables and do not count.
    """
    found = 0
    for name, kind, at, size in _rows(data):
        if name.startswith(".nv.global"):
            body = b"" if kind == _NOBITS else data[at : at + size]
            found += len(_REFLECTED.sub(b"", body)) if body else size
    return found


def _sections(data: bytes) -> dict[str, bytes]:
    return {n: b"" if kind == _NOBITS else data[at : at + size] for n, kind, at, size in _rows(data)}


def _rows(data: bytes) -> list[tuple[str, int, int, int]]:
    """(name, kind, offset, size) of every section."""
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count, names = struct.unpack_from("<HHH", data, 58)
    if size != 64 or count > MAX_SECTIONS or names >= count or table + size * count > len(data):
        raise Malformed("the section table runs past the end")
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * i) for i in range(count)]
    strings = rows[names][4]
    found = []
    for name, kind, _, _, offset, length, *_ in rows:
        start = strings + name
        end = data.find(b"\0", start, start + 4096)
        if end < 0 or (kind != _NOBITS and offset + length > len(data)):
            raise Malformed("a section runs past the end")
        found.append((data[start:end].decode("utf-8", "replace"), kind, offset, length))
    named = [row[0] for row in found if row[0].startswith((".text.", ".nv.info."))]
    if len(set(named)) != len(named):
        raise Malformed("two sections of one name: a driver may take the other")
    return found


def _parameters(info: bytes) -> tuple[Parameter, ...]:
    found: dict[int, Parameter] = {}
    at, total = 0, None
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        body = info[at + 4 : at + 4 + value] if form == _SIZED else b""
        if attribute == _KPARAM_INFO and len(body) == 12:
            _, ordinal, offset, packed = struct.unpack("<IHHI", body)
            if ordinal in found:
                raise Malformed(f"parameter {ordinal} is described twice")
            found[ordinal] = Parameter(offset, packed >> 18)
        elif attribute == _CBANK_PARAM_SIZE and form == _SHORT:
            total = value
        at += 4 + len(body)
    ordered = tuple(found[i] for i in sorted(found))
    if list(found) and sorted(found) != list(range(len(found))):
        raise Malformed("a parameter is missing")
    if total is not None and any(p.offset + p.size > total for p in ordered):
        raise Malformed("a parameter lies outside the parameter block")
    return ordered
