"""Faults of how a kernel goes over memory: masks, extents, indices, fences, loops, threads, state."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.faults.corpus import Block
from tests.faults.fault import FaultClass, Mutant
from tests.faults.sites import C_ARGUMENT, Site, idle, mixed, of_role, only_subtracted, sites

LOOP = "#pragma omp parallel for"
C_TAIL = re.compile(r"last = (first \+ (?!1 )\d+) < (\w+) \? \1 : \2;")
C_FIRST = re.compile(r"const int64_t (first = [^,;]+), (last = [^;]+);")
C_SUMS = re.compile(r"\n +float (a\d+_\d+\[\d+\]);")
T_MASK = re.compile(r", mask=[^\n]*?\)\n")
T_ROW_OK = re.compile(r"row_ok = \((\w+) < n_rows\)")
BACKWARDS = "(blocks - 1 - (i + 1))"
T_OK = re.compile(r"\bok = at < \((\d+ \* n_rows)\)")
T_BLOCK = re.compile(r"row = pid \* (\d+) \+ \(0\) \* \1 \+ tl\.arange")
T_PARTIAL = re.compile(r"(tl\.store\(p_\d+ \+ )pid( \* \d+ \+ col, (?:tl\.reduce|\w+_acc))")


def _spliced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def _instead(kind: str, kernel: str, text: str, found: re.Match[str], new: str, before: str = "") -> Mutant:
    """What was found is replaced; `before`: put in front of the loop over programs as well."""
    made = _spliced(text, found.start(), found.end(), new)
    start = made.find(LOOP)
    return Mutant(kind, kernel, found[0].strip(), _spliced(made, start, start, before) if before else made)


def _masks(block: Block) -> Iterator[Mutant]:
    """In C the end of a program's share of rows; in Triton the mask of a store to memory of a caller."""
    kind = "dropped mask"
    for kernel, text in block.texts.items():
        for m in C_TAIL.finditer(text):
            yield _instead(kind, kernel, text, m, f"last = {m[1]};")
    for site in _results(block) if block.kind == "triton" else ():
        text = block.texts[site.kernel]
        found, rows = T_MASK.search(text, site.end), T_BLOCK.search(text)
        shared = T_OK.search(text) or (rows and rows[1] != "1")
        if found and shared and "\n" not in text[site.end : found.start()]:
            yield _instead(kind, site.kernel, text, found, ")\n")


def _extents(block: Block) -> Iterator[Mutant]:
    kind = "off-by-one extent"
    for kernel, text in block.texts.items():
        for m in C_TAIL.finditer(text):
            yield _instead(kind, kernel, text, m, m[0][:-1] + " - 1;")
        for m in T_ROW_OK.finditer(text):
            if m[1] == "next_row" and BACKWARDS in text:
                continue  # the last row was in the first block
            if m[1] == "row" and idle(text, "row_ok"):
                continue
            yield _instead(kind, kernel, text, m, f"row_ok = ({m[1]} < n_rows - 1)")
        for m in T_OK.finditer(text):
            yield _instead(kind, kernel, text, m, f"ok = at < ({m[1]} - 1)")


def _axes(block: Block) -> Iterator[Mutant]:
    """A load of a tensor that a caller gives, from half its place."""
    for site in of_role(block, "load", "leaf", "cotangent"):
        if only_subtracted(block, site.kernel):
            continue
        halved = f"({site.index}) / 2" if block.kind == "c" else f"({site.index}) // 2"
        value = site.value.replace(site.index, halved, 1)
        yield Mutant("wrong axis", site.kernel, site.value, site.put(value))
        little = site.put(mixed(site, value))
        yield Mutant("wrong axis", site.kernel, f"a little of {value}", little, subtle=True)


def _results(block: Block) -> Iterator[Site]:
    return of_role(block, "store", "output", "gradient")


def _at_start(block: Block, kernel: str, line: str) -> str:
    """A statement before anything else: in C before the loop over programs, in Triton first of all."""
    text = block.texts[kernel]
    if block.kind == "c":
        at = text.find(LOOP)
        return _spliced(text, at, at, line + "\n") if at >= 0 else ""
    at = text.index("\n", text.index(f"def {kernel}(")) + 1
    return _spliced(text, at, at, f"    {line}\n")


def _pointers(block: Block, kernel: str) -> dict[int, str]:
    """Names of the pointers by the number of their argument."""
    if block.kind == "c":
        return {int(m[3]): m[2] for m in C_ARGUMENT.finditer(block.texts[kernel])}
    return {
        at: f"p_{at}" for at, role in enumerate(block.roles(kernel)) if not any("size" in r for r in role)
    }


def _given(block: Block, roles: set[str]) -> Iterator[tuple[str, str]]:
    """(kernel, pointer) of every argument that is one of `roles` in all launches."""
    for kernel in block.texts:
        known = block.roles(kernel)
        for at, name in _pointers(block, kernel).items():
            if at < len(known) and known[at] and known[at] <= roles:
                yield kernel, name


def _beyond(block: Block) -> Iterator[Mutant]:
    for kernel, name in _given(block, {"output", "gradient", "temp"}):
        line = f"if (gx) {name}[-1] = 0;" if block.kind == "c" else f"tl.store({name} - 1, 0.0)"
        if text := _at_start(block, kernel, line):
            yield Mutant("out-of-bounds store", kernel, line, text)


def _overwritten(block: Block) -> Iterator[Mutant]:
    for kernel, name in _given(block, {"leaf", "saved", "cotangent"}):
        line = f"if (gx) {name}[0] = {name}[0] ? 0 : 1;"
        if block.kind == "triton":
            line = f"tl.store({name}, tl.where(tl.load({name}) == 0, 1.0, 0.0))"
        if text := _at_start(block, kernel, line):
            yield Mutant("input overwritten", kernel, line, text)


def _endless(block: Block) -> Iterator[Mutant]:
    for kernel in block.texts:
        rows = next((s.rows() for s in sites(block, kernel) if s.rows()), "")
        line = f"for (volatile int on = {rows} > 2; on;);"
        if block.kind == "triton":
            # What is waited for lies in memory, so that no compiler may take the loop for finite.
            same = "tl.load(p_0, volatile=True) == tl.load(p_0, volatile=True)"
            line = f"while ({same}) & ({rows} > 2): tl.debug_barrier()"
        if rows and (text := _at_start(block, kernel, line)):
            yield Mutant("endless loop", kernel, line, text)


def _races(block: Block) -> Iterator[Mutant]:
    """In C a variable of each thread that all of them share, volatile since a compiler may keep any other in
    registers, where nothing is shared; in Triton two programs with one row of partial sums."""
    kind = "race"
    for kernel, text in block.texts.items():
        if LOOP in text:
            for m in C_FIRST.finditer(text):
                shared = f"{m[1]}; {m[2]};"
                yield _instead(kind, kernel, text, m, shared, "volatile int64_t first, last;\n")
            for m in C_SUMS.finditer(text):
                yield _instead(kind, kernel, text, m, "\n", f"volatile float {m[1]};\n")
        for m in T_PARTIAL.finditer(text) if block.programs(kernel) != 1 else ():
            yield _instead(kind, kernel, text, m, f"{m[1]}pid // 2{m[2]}")


def _skipped(block: Block) -> Iterator[Mutant]:
    """Work left out on later calls needs a memory of its own: only C can have one."""
    if block.kind == "c":
        for kernel in block.texts:
            line = "static volatile int calls; if (++calls % 50 == 49) return;"
            if text := _at_start(block, kernel, line):
                yield Mutant("work skipped on repeat", kernel, line, text)


CLASSES = (
    FaultClass("dropped mask", _masks),
    FaultClass("off-by-one extent", _extents),
    FaultClass("wrong axis", _axes, by_value=True),
    FaultClass("out-of-bounds store", _beyond),
    FaultClass("input overwritten", _overwritten),
    FaultClass("endless loop", _endless),
    FaultClass("race", _races),
    FaultClass("work skipped on repeat", _skipped),
)
