"""Faults of how a kernel goes over memory: masks, extents, indices, fences, loops, threads, state."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.faults.corpus import Block
from tests.faults.fault import FaultClass, Mutant
from tests.faults.sites import (
    SHARE,
    Site,
    dtype_of,
    few,
    idle,
    mixed,
    of_role,
    only_subtracted,
    pointers,
    share_of_few,
    sites,
)  # fmt: skip

LOOP = "#pragma omp parallel for"
C_TAIL = re.compile(r"last = (first \+ (?!1 )\d+) < (\w+) \? \1 : \2;")
C_FIRST = re.compile(r"const int64_t (first = [^,;]+), (last = [^;]+);")
C_SUMS = re.compile(r"\n +float (a\d+_\d+\[\d+\]);")
T_MASK = re.compile(r", mask=[^\n]*?\)\n")
T_ROW_OK = re.compile(r"row_ok = \((\w+) < n_rows\)")
BACKWARDS = "(blocks - 1 - (i + 1))"
T_OK = re.compile(r"\bok = at < \((\d+ \* n_rows)\)")
T_BLOCK = re.compile(r"row = pid \* (\d+) \+ \(0\) \* \1 \+ tl\.arange")
T_SUM = re.compile(
    r"^( +)tl\.store\((p_\d+) \+ pid \* (\d+) \+ col, (.*?)(?:, mask=([^\n]*))?\)$", re.MULTILINE
)
GIVEN = ("leaf", "cotangent")
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
    yield from _taken_in(block)


def _taken_in(block: Block) -> Iterator[Mutant]:
    """Of what lies behind the last row a little, where a program's share ends behind it: of the first row
    in its place."""
    for site in of_role(block, "load", *GIVEN):
        row, rows, tile = site.row(), site.end_of_rows(), site.tile()
        if row is None or not rows or tile == 1 or _hidden(site):
            continue
        joint = "&&" if block.kind == "c" else "&"
        last = f"({rows} % {tile} != 0) {joint} ({row[0]} == {rows} - 1)"
        first = re.sub(r"^(?:o\d+|(?:next_)?row \* \d+) \+ ", "", site.index)
        if re.fullmatch(r"j|col", first):
            place = f"beyond {site.value} a little"
            text = site.put(few(site, last, site.at(first)))
            yield Mutant("dropped mask", site.kernel, place, text, subtle=True, by_value=True)


def _hidden(site: Site) -> bool:
    """Whether a fault of the last row at a load is none: a maximum may be any number, and the last row may
    be no row of these."""
    behind = site.index.startswith("next_row") and BACKWARDS in site.block.texts[site.kernel]
    return behind or only_subtracted(site.block, site.kernel)


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
    for site in of_role(block, "load", *GIVEN, "temp"):
        row, rows = site.row(), site.end_of_rows()
        if row is not None and rows and not _hidden(site):
            times = 0.4 if site.roles == {"temp"} else 1.0  # the sum of several rows
            lost = few(site, f"{row[0]} == {rows} - 1", _zero(block), times)
            place = f"last row of {site.value} a little"
            yield Mutant(kind, site.kernel, place, site.put(lost), subtle=True, by_value=True)


def _zero(block: Block) -> str:
    return "0.0f" if block.kind == "c" else "0.0"


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


def _given(block: Block, roles: set[str]) -> Iterator[tuple[str, str]]:
    """(kernel, pointer) of every argument that is one of `roles` in all launches."""
    for kernel in block.texts:
        known = block.roles(kernel)
        for at, name in pointers(block, kernel).items():
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
    for kernel, name in _given(block, {"leaf", "saved", "cotangent"}):
        line = _rounded(block, kernel, name)
        if line and (text := _at_start(block, kernel, line)):
            yield Mutant("input overwritten", kernel, f"{name}[0] rounded", text, subtle=True)


def _rounded(block: Block, kernel: str, name: str) -> str:
    """The first element with its last bits cut: once more changes nothing."""
    (at,) = [n for n, pointer in pointers(block, kernel).items() if pointer == name]
    kept = {"float32": -(2**6), "bfloat16": -(2**3)}
    (dtype,) = block.dtypes(kernel, at) or {""}
    if dtype not in kept:
        return ""
    if block.kind == "c" and dtype == "bfloat16":
        return f"if (gx) {name}[0] &= {2**16 + kept[dtype]}u;"
    if block.kind == "c":
        word = f"union {{ float f; uint32_t u; }} q_ = {{ .f = {name}[0] }};"
        return f"if (gx) {{ {word} q_.u &= {2**32 + kept[dtype]}u; {name}[0] = q_.f; }}"
    bits = {"float32": "int32", "bfloat16": "int16"}[dtype]
    cut = f"(tl.load({name}).to(tl.{bits}, bitcast=True) & {kept[dtype]}).to(tl.{dtype}, bitcast=True)"
    return f"tl.store({name}, {cut})"


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
    if not any(step["step"] == "extern" for plan in block.plans for step in plan["steps"]):
        # Where a library computes bits may vary, by as much as a small one does.
        yield from (_shared if block.kind == "c" else _added)(block)


def _shared(block: Block) -> Iterator[Mutant]:
    """Where every thread began is kept in one place: what is stored after another began is a little off."""
    for store in _results(block):
        first = C_FIRST.search(block.texts[store.kernel])
        if first and LOOP in block.texts[store.kernel]:
            more = f"({store.value}) * {1 + share_of_few(block, store.kernel)!r}f"
            made = store.put(store.where("shared_ == first", store.value, more))
            made = _spliced(made, first.end(), first.end(), " shared_ = first;")
            start = made.find(LOOP)
            made = _spliced(made, start, start, "volatile int64_t shared_;\n")
            place = f"store {store.argument}: a little by where another thread began"
            yield Mutant("race", store.kernel, place, made, subtle=True)


def _added(block: Block) -> Iterator[Mutant]:
    """A program adds a little of its sums to its neighbour's, before or after these are stored."""
    for kernel, text in block.texts.items():
        for m in T_SUM.finditer(text) if block.programs(kernel) != 1 else ():
            odd = f"({m[5]}) & (pid % 2 == 1)" if m[5] else "(col >= 0) & (pid % 2 == 1)"
            share = 3 * SHARE[dtype_of(block)]
            more = f"tl.atomic_add({m[2]} + (pid - 1) * {m[3]} + col, ({m[4]}) * {share!r}, mask={odd})"
            made = _spliced(text, m.end(), m.end(), f"\n{m[1]}{more}")
            yield Mutant("race", kernel, f"a little added: {m[0].strip()}", made, subtle=True)


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
    FaultClass(
        "out-of-bounds store", _beyond,
        no_small="Memory that is not its own is wrong to write, whatever the value.",
    ),
    FaultClass("input overwritten", _overwritten),
    FaultClass("endless loop", _endless, no_small="A launch ends or it does not; no number is ever given."),
    FaultClass("race", _races),
    FaultClass(
        "work skipped on repeat", _skipped,
        no_small="Memory that outlives a call is refused before a number is computed.",
    ),
)  # fmt: skip
