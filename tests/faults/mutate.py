"""Plants faults in what the forge emits: C text mutated store by store, load by load, kernel by kernel.

Every mutation changes what some kernel writes, reads or does for values and sizes that the declared range
contains, so that none is equivalent to the original by construction.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from library.manifest import pack, unpack

KERNEL = re.compile(r"void (\w+)\(void \*const \*args.*?\n}\n", re.DOTALL)
POINTER = re.compile(r"(\w+) \*const (b\d+_\w+) = ")
STORE = re.compile(r"(b\d+_\w+)\[([^\]]+)\] = ([^;]+);")
LOAD = re.compile(r"const float (t\d+) = (from_\w+\()?(b\d+_\w+)\[([^\]]+)\](\))?;")
REST = re.compile(r"for \(int64_t j = j0_\d+; j < cols; j\+\+\) \{.*?\n            \}", re.DOTALL)
"""What is left of a row after whole vectors: nothing, where the length is a multiple of 16."""
TAIL = re.compile(r"last = (first \+ (?!1 )\d+) < (\w+) \? \1 : \2;")
ROWS = "n_rows"


@dataclass(frozen=True)
class Mutant:
    """`text`: the whole module with one place changed."""

    kind: str
    kernel: str
    place: str
    text: str


Change = Callable[[re.Match[str]], str]


def _store(change: Callable[[str, str, str], str]) -> Change:
    return lambda m: change(m[1], m[2], m[3])


def _narrowed(value: str) -> str:
    """The stored value with four bits of the mantissa fewer than its type holds."""
    if value.startswith("high_half("):
        return f"(uint16_t)({value} & 0xfff0u)"
    return f"float_of(bits_of({value}) & 0xffff0000u)"


STORES: tuple[tuple[str, Change], ...] = (
    ("nothing stored", _store(lambda b, i, v: ";")),
    ("constant output", _store(lambda b, i, v: f"{b}[{i}] = 0;")),
    ("precision downgrade", _store(lambda b, i, v: f"{b}[{i}] = {_narrowed(v)};")),
    ("size-dependent", _store(lambda b, i, v: f"if ({ROWS} != 17) {b}[{i}] = {v};")),
    ("size-dependent", _store(lambda b, i, v: f"{b}[{i}] = {ROWS} == 3 ? 0 : {v};")),
    ("NaN on rare input", _store(lambda b, i, v: f"{b}[{i}] = {v}; if (!{b}[{i}]) {b}[{i}] = -1;")),
)
LOADS: tuple[tuple[str, Change], ...] = (
    ("wrong axis", lambda m: m[0].replace(f"[{m[4]}]", f"[({m[4]}) / 2]")),
    ("NaN on rare input", lambda m: f'{m[0][:-1]} + ({m[3]}[{m[4]}] == 0 ? __builtin_nanf("") : 0.0f);'),
)
GIVEN = re.compile(r"b\d+_(grad_3a_)?[A-Za-z0-9]+\Z")
"""Names of what comes from outside; a statistic such as a scale may never be zero."""
STATE = "static volatile int calls; if (++calls % 50 == 49) return;"


def _kernels(text: str) -> Iterator[tuple[str, int, str]]:
    for m in KERNEL.finditer(text):
        yield m[1], m.start(), m[0]


def _spliced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def mutants(text: str) -> Iterator[Mutant]:
    """All of them, kernel by kernel."""
    for name, at, body in _kernels(text):
        dead = [(m.start(), m.end()) for m in REST.finditer(body)]
        for kind, found, new in _places(body):
            if not any(low <= found.start() < high for low, high in dead):
                changed = _spliced(text, at + found.start(), at + found.end(), new)
                yield Mutant(kind, name, found[0], changed)
        yield from _whole(text, name, at, body)


def _places(body: str) -> Iterator[tuple[str, re.Match[str], str]]:
    """(class, place, new text) of every store, load and end of a program's share."""
    sized = ROWS in body
    for pattern, table in ((STORE, STORES), (LOAD, LOADS)):
        pairs = product(pattern.finditer(body), table)
        changed = ((kind, found, change(found)) for found, (kind, change) in pairs)
        for kind, found, new in changed:
            rare = kind.startswith("NaN") and pattern is LOAD and not GIVEN.match(found[3])
            if (sized or ROWS not in new) and not rare and not _within_bounds(kind, found):
                yield kind, found, new
    for found in TAIL.finditer(body):
        yield "dropped mask", found, f"last = {found[1]};"
        yield "off by one", found, found[0][:-1] + " - 1;"


def _within_bounds(kind: str, found: re.Match[str]) -> bool:
    """A float32 statistic that is saved for a block of a shorter type may lose bits and every result stay
    right.
    """
    return kind == "precision downgrade" and not GIVEN.match(found[1]) and "high_half" not in found[3]


def _whole(text: str, name: str, at: int, body: str) -> Iterator[Mutant]:
    """Faults of a whole kernel, put in before its loop over programs."""
    start = body.find("#pragma omp parallel for")
    pointers = POINTER.findall(body)
    written = {m[1] for m in STORE.finditer(body)}
    if start < 0 or not pointers or not written:
        return
    only_read = [p for _, p in pointers if p not in written]
    out = sorted(written)[-1]
    added = [
        ("work skipped on repeat", STATE),
        ("out of bounds store", f"if (gx) {out}[-1] = 0;"),
        *([("endless loop", f"for (volatile int on = {ROWS} == 3; on;);")] if ROWS in body else []),
        *[("input overwritten", f"if (gx) {p}[0] = {p}[0] ? 0 : 1;") for p in only_read[:2]],
    ]
    for kind, line in added:
        yield Mutant(kind, name, line, _spliced(text, at + start, at + start, line + "\n"))


def rebuilt(container: bytes, text: str) -> bytes:
    """The artifact with its module compiled from other text, by the compiler and flags that it names."""
    made = unpack(container)
    manifest: dict[str, Any] = json.loads(json.dumps(made.manifest))
    code = _compiled(text, tuple(manifest["toolchain"]["flags"]))
    manifest = {k: v for k, v in manifest.items() if k not in ("artifact_id", "blobs")}
    manifest["version"] = sha256(code).hexdigest()
    blobs = [(b["name"], b["kind"], code) for b in made.manifest["blobs"]]
    return pack(manifest, blobs)


def _compiled(text: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "module.so"
        command = ["gcc", *flags, "-", "-o", str(out)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(done.stderr[:2000])
        return out.read_bytes()
