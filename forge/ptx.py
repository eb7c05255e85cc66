"""PTX as text: parameter tables of entries, and joining the entries of an artifact into one module.

One module means one assembler run and one load for the whole artifact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from esper_ir.diagnostics import EsperError
from library.launch import Param

_HEADER = re.compile(r"^\s*\.(version|target|address_size)\b.*$", re.MULTILINE)
_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+\.(\w+)(?:\s+\.ptr(?:\s+\.\w+)*(?:\s+\.align\s+\d+)?)?\s+\w+")
_SHARED = re.compile(r"^\s*\.extern\s+\.shared\b.*;\s*$", re.MULTILINE)
_SYMBOL = re.compile(
    r"^\s*(?:\.visible\s+|\.weak\s+)?\.(?:global|const)\b[^;{=]*?[\s]([\w$]+)\s*(?:\[[^\]]*\])*\s*[=;]",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"^\s*(?:\.weak\s+)?\.func\s*(?:\([^)]*\)\s*)?([\w$]+)", re.MULTILINE)
_KINDS = {"u64": ("ptr", 8), "b64": ("ptr", 8), "u32": ("i32", 4), "b32": ("i32", 4), "s32": ("i32", 4)}


@dataclass(frozen=True)
class Entry:
    name: str
    params: tuple[Param, ...]


def entries(ptx: str) -> tuple[Entry, ...]:
    """Every entry with its parameters at their natural offsets (64-bit ones are reported as pointers)."""
    out = []
    for name, text in _ENTRY.findall(ptx):
        params, offset = [], 0
        for kind in _PARAM.findall(text):
            if kind not in _KINDS:
                raise EsperError("E0541", f"entry {name} has a parameter of kind .{kind}", node=name)
            label, size = _KINDS[kind]
            offset = -(-offset // size) * size
            params.append(Param(label, offset, size))
            offset += size
        out.append(Entry(name, tuple(params)))
    return tuple(out)


def join(modules: list[str]) -> str:
    """One module with all entries, of the highest PTX version among them. Module-level symbols and functions
    get the entry's name, shared memory is declared once.
    """
    header = max(map(_headers, modules), key=lambda lines: [int(n) for n in re.findall(r"\d+", lines[0])])
    bodies: list[str] = []
    shared: list[str] = []
    for text in modules:
        if _headers(text)[1:] != header[1:]:
            raise EsperError("E0542", "kernels of one artifact were compiled for different PTX targets")
        body = _HEADER.sub("", text)
        shared += [s.strip() for s in _SHARED.findall(body)]
        body = _SHARED.sub("", body)
        owner = entries(text)[0].name
        for symbol in dict.fromkeys(_SYMBOL.findall(body)):
            used = re.compile(rf"(?<![\w$]){re.escape(symbol)}(?![\w$])")
            if len(used.findall(body)) == 1:
                body = _definition(symbol).sub("", body)
            body = used.sub(f"{symbol}__{owner}", body)
        for function in dict.fromkeys(_FUNCTION.findall(body)):  # slow ways of float64
            body = re.sub(rf"(?<![\w$]){re.escape(function)}(?![\w$])", f"{function}__{owner}", body)
        bodies.append(
            "\n".join(line for line in body.splitlines() if line.strip() and not line.startswith("//"))
        )
    return "\n".join([*header, *dict.fromkeys(shared), *bodies]) + "\n"


def _definition(symbol: str) -> re.Pattern[str]:
    """The whole statement that defines a module-level symbol (libdevice leaves some that nothing reads)."""
    start = r"^[ \t]*(?:\.visible\s+|\.weak\s+)?\.(?:global|const)\b[^;{=]*?"
    return re.compile(rf"{start}\s{re.escape(symbol)}\s*(?:\[[^\]]*\])*\s*(?:=[^;]*)?;[ \t]*$", re.MULTILINE)


def _headers(text: str) -> list[str]:
    found = {m.group(1): m.group(0).strip() for m in _HEADER.finditer(text)}
    return [found[k] for k in ("version", "target", "address_size") if k in found]
