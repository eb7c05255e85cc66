"""Places in a kernel's text where a value is loaded or stored, in C and in Triton alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

from esper_ir import oracle
from esper_ir.types import DType
from tests.faults.corpus import Block

C_ARGUMENT = re.compile(r"(\w+) \*const (b\d+_\w+) = \*\(\w+ \*const \*\)args\[(\d+)\];")
C_STORE = re.compile(r"(?P<b>b\d+_\w+)\[(?P<i>[^\]]+)\] = (?P<v>[^;]+);")
C_LOAD = re.compile(r"const float (?P<t>t\d+) = (?P<v>(?:from_\w+\()?(?P<b>b\d+_\w+)\[(?P<i>[^\]]+)\]\)?);")
C_REST = re.compile(r"for \(int64_t j = (?P<at>j\d+_\d+); j < cols; j\+\+\) \{.*?\n            \}", re.DOTALL)
"""What is left of a row after whole vectors."""
C_COLUMNS = re.compile(r"\bcols = INT64_C\((\d+)\)")
T_STORE = re.compile(r"tl\.store\(p_(?P<n>\d+) \+ (?P<i>[^,\n]+), \((?P<v>v\d+)\)\.to\(tl\.(?P<d>\w+)\)")
T_LOAD = re.compile(
    r"(?P<t>(?:raw_|next_raw_)?v\d+) = "
    r"(?P<v>tl\.load\(p_(?P<n>\d+) \+ (?P<i>[^,\n]+?)(?P<m>, mask=[^\n]*?)?\)"
    r"(?P<c>\.to\(tl\.float32\))?)\n"
)
BITS = {"float": "float32", "uint16_t": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}
SMALL = {"float32": 1.5e-6, "bfloat16": 0.03}
"""A relative error of two to eight times what rounding explains."""
SHARE = {"float32": 9e-7, "bfloat16": 0.016}
"""Of a wrong value in every element: the root mean square error is a few times what is allowed."""
TIMES, ROOT = 1.6, 6.5
"""Of the bound of an element, where few are wrong; by so much their root mean square among all is smaller
than in one row (a root of 48 rows)."""
T_TILE = re.compile(r"\brow = [^\n]*\* (\d+) \+ tl\.arange\(0, \1\)")
C_TILE = re.compile(r"last = first \+ (\d+) < ")
T_FLAT = re.compile(r"\bok = at < \((\d+) \* n_rows\)")


@dataclass(frozen=True)
class Site:
    """A load or a store of `kernel`: `argument` (its number), `roles` over all launches, `dtype` of the
    buffer ("float32" or "bfloat16"), `index` and `value` as texts; `start` and `end` of the value; `name`:
    the variable that a load defines, or that a store takes."""

    block: Block
    kernel: str
    what: str
    argument: int
    roles: frozenset[str]
    dtype: str
    index: str
    value: str
    start: int
    end: int
    name: str

    def put(self, value: str) -> str:
        """The kernel's text with another float value here."""
        text = self.block.texts[self.kernel]
        if self.block.kind == "c" and self.what == "store" and self.dtype == "bfloat16":
            value = f"high_half(round_bf16({value}))"
        return text[: self.start] + value + text[self.end :]

    def where(self, condition: str, then: str, other: str) -> str:
        """A choice in the kernel's language."""
        if self.block.kind == "c":
            return f"(({condition}) ? ({then}) : ({other}))"
        return f"tl.where({condition}, {then}, {other})"

    def rows(self) -> str:
        """The name of the number of rows inside the kernel; empty when it is not given (a sum over partial
        rows may be given their number)."""
        text, roles = self.block.texts[self.kernel], self.block.roles(self.kernel)
        at = next((n for n, role in enumerate(roles) if role == {"size rows"}), -1)
        if self.block.kind == "c":
            found = re.search(rf"int64_t (n_\w+) = \*\(const \w+ \*\)args\[{at}\];", text)
            return found[1] if found else ""
        names = re.search(rf"def {self.kernel}\(([^)]*)\)", text)
        return names[1].split(", ")[at] if names and at >= 0 else ""

    def row(self) -> tuple[str, int] | None:
        """The number of the row here, as a text, and the elements of a row; None where there are no rows."""
        text = self.block.texts[self.kernel]
        if self.block.kind == "c":
            at = re.match(r"o\d+\b", self.index)
            found = re.search(rf"\b{at[0]} = (i\d+)(?: \* INT64_C\((\d+)\))?;", text) if at else None
            return (found[1], int(found[2] or 1)) if found else None
        found = re.match(r"((?:next_)?row) \* (\d+) \+", self.index)
        if found:
            return found[1], int(found[2])
        flat = T_FLAT.search(text) if self.index == "at" else None
        return (f"(at // {flat[1]})", int(flat[1])) if flat else None

    def end_of_rows(self) -> str:
        """How many rows the kernel goes over, partial sums where it goes over these; empty when unknown."""
        if self.block.kind == "c":
            return "rows"
        rows = re.search(r"ok = \(row < (\w+)\)", self.block.texts[self.kernel])
        return rows[1] if rows else self.rows()

    def tile(self) -> int:
        """Rows of a program; 1 where its end is no matter of rows."""
        found = (C_TILE if self.block.kind == "c" else T_TILE).search(self.block.texts[self.kernel])
        return int(found[1]) if found else 1

    def at(self, index: str, argument: int = -1) -> str:
        """What a load gives at another index, or from another argument."""
        if self.block.kind == "c":
            bare = self.value.rpartition("(")[2].partition("[")[0]
            other = pointers(self.block, self.kernel).get(argument, bare)
            return self.value.replace(f"{bare}[{self.index}]", f"{other}[{index}]", 1)
        other = self.argument if argument < 0 else argument
        return self.value.replace(f"p_{self.argument} + {self.index}", f"p_{other} + {index}", 1)

    def before(self) -> str:
        """What lies where a store goes to, as a float, kept between -1 and 1."""
        if self.block.kind == "c":
            bare = f"{pointers(self.block, self.kernel)[self.argument]}[{self.index}]"
            lies = f"from_bf16({bare})" if self.dtype == "bfloat16" else bare
            return self.where(f"{lies} > 1.0f", "1.0f", self.where(f"{lies} > -1.0f", lies, "-1.0f"))
        mask = re.match(r"[^\n]*?, mask=([^\n]*)\)\n", self.block.texts[self.kernel][self.end :])
        guarded = f", mask={mask[1]}, other=0" if mask else ""
        lies = f"tl.load(p_{self.argument} + {self.index}{guarded}).to(tl.float32)"
        return self.where(f"{lies} > 1.0", "1.0", self.where(f"{lies} > -1.0", lies, "-1.0"))

    def spoilt(self, share: float) -> str:
        """The value of a store with so much of what lay there before."""
        of = "f" if self.block.kind == "c" else ""
        return f"({self.value}) * (1.0{of} + {self.before()} * {share!r}{of})"

    def element(self, at: int) -> str:
        """Element number `at` of the same buffer, as a float."""
        if self.block.kind == "c":
            bare = f"{self.value.rpartition('(')[2].partition('[')[0]}[{at}]"
            return f"from_bf16({bare})" if self.dtype == "bfloat16" else bare
        return f"tl.load(p_{self.argument} + {at}).to(tl.float32)"


def sites(block: Block, kernel: str) -> Iterator[Site]:
    """Every one that the patterns know, in order of the text."""
    text = block.texts[kernel]
    roles = [frozenset(r) for r in block.roles(kernel)]
    if roles:
        yield from (_in_c if block.kind == "c" else _in_triton)(block, kernel, text, roles)


def _in_c(block: Block, kernel: str, text: str, roles: list[frozenset[str]]) -> Iterator[Site]:
    known = {m[2]: (int(m[3]), BITS.get(m[1], "")) for m in C_ARGUMENT.finditer(text)}
    dead = [(m.start(), m.end()) for m in C_REST.finditer(text) if _empty(text, m["at"])]
    for what, pattern in (("load", C_LOAD), ("store", C_STORE)):
        for m in pattern.finditer(text):
            at, dtype = known.get(m["b"], (-1, ""))
            if at < 0 or not dtype or any(low <= m.start() < high for low, high in dead):
                continue
            found = partial(Site, block, kernel, what, at, roles[at], dtype, m["i"])
            if what == "load":
                yield found(m["v"], m.start("v"), m.end("v"), m["t"])
            elif dtype == "float32" or m["v"].startswith("high_half("):
                value = m["v"].removeprefix("high_half(").removesuffix(")") if dtype != "float32" else m["v"]
                yield found(value, m.start("v"), m.end("v"), value)


def _empty(text: str, at: str) -> bool:
    """Whether nothing is left of any row: its length is a multiple of the vectors."""
    columns, step = C_COLUMNS.search(text), re.search(rf"; {at} \+= (\d+)\)", text)
    return columns is not None and step is not None and int(columns[1]) % int(step[1]) == 0


def _in_triton(block: Block, kernel: str, text: str, roles: list[frozenset[str]]) -> Iterator[Site]:
    entry = text.index(f"def {kernel}(")
    for m in T_LOAD.finditer(text, entry):
        at = int(m["n"])
        dtype = "bfloat16" if m["c"] or "bfloat16" in block.dtypes(kernel, at) else "float32"
        span = (m.start("v"), m.end("v"))
        yield Site(block, kernel, "load", at, roles[at], dtype, m["i"], m["v"], *span, m["t"])
    for m in T_STORE.finditer(text, entry):
        at, dtype = int(m["n"]), BITS.get(m["d"], "")
        if dtype:
            span = (m.start("v"), m.end("v"))
            yield Site(block, kernel, "store", at, roles[at], dtype, m["i"], m["v"], *span, m["v"])


def only_subtracted(block: Block, kernel: str) -> bool:
    """Whether the kernel takes a maximum over rows (as softmax does, where it may be any other number)."""
    body = block.texts[kernel].partition(f"{kernel}(")[2]
    return "__builtin_inff()" in body or bool(re.search(r"tl\.reduce\([^\n]*_max", body))


@cache
def scale_of(block: Block) -> float:
    """About how large results are beside what comes in: small where they are shares of a sum."""
    return min(block.scale, 1.0)


def stored(block: Block, kernel: str) -> set[int]:
    """Numbers of the arguments that a kernel writes to."""
    text = block.texts[kernel]
    if block.kind == "triton":
        return {int(m) for m in re.findall(r"tl\.store\(p_(\d+)", text)}
    known = {m[2]: int(m[3]) for m in C_ARGUMENT.finditer(text)}
    alias = {m[1]: m[2] for m in re.finditer(r"\*const (c\d+) = (b\d+_\w+)", text)}
    named = re.findall(r"\b(b\d+_\w+|c\d+)\[[^\]]+\] = ", text)
    return {known[alias.get(n, n)] for n in named if alias.get(n, n) in known}


def idle(text: str, name: str) -> bool:
    """Whether a kernel only ever names it where it is made, or for what is idle itself: a mask that no load
    and no store has, of a program that has one row."""
    places = [line for line in text.splitlines() if re.search(rf"\b{name}\b", line)]
    made = [line for line in places if re.match(rf" +{name} = |def ", line)]
    used = [m for line in places if line not in made for m in [re.match(r" +(\w+) = \(row < \w+\)", line)]]
    return all(m is not None and idle(text, m[1]) for m in used)


def added(block: Block, kernel: str, one: int, two: int) -> bool:
    """Whether values of two arguments are terms of one sum somewhere in the kernel."""
    text = block.texts[kernel]
    names = [
        [s.name.removeprefix("raw_") for s in sites(block, kernel) if s.what == "load" and s.argument == at]
        for at in (one, two)
    ]
    pairs = [(a, b) for a in names[0] for b in names[1]]
    return any(re.search(rf"\b({a}\)* \+ \(*{b}|{b}\)* \+ \(*{a})\b", text) for a, b in pairs)


def pointers(block: Block, kernel: str) -> dict[int, str]:
    """Names of the pointers by the number of their argument."""
    if block.kind == "c":
        return {int(m[3]): m[2] for m in C_ARGUMENT.finditer(block.texts[kernel])}
    return {
        at: f"p_{at}" for at, role in enumerate(block.roles(kernel)) if not any("size" in r for r in role)
    }


def mixed(site: Site, value: str, share: float = 0.0) -> str:
    """A little of a wrong value in what is right: a fault of the same kind near the bound."""
    share, of = share or SHARE[dtype_of(site.block)], "f" if site.block.kind == "c" else ""
    return f"(({site.value}) * {1 - share!r}{of} + ({value}) * {share!r}{of})"


def few(site: Site, condition: str, value: str, times: float = 1.0) -> str:
    """The same in few elements, by the bound that holds for each."""
    little = mixed(site, value, times * share_of_few(site.block, site.kernel))
    return site.where(condition, little, site.value)


@cache
def share_of_few(block: Block, kernel: str) -> float:
    """A relative error in one row, of a few times what docs/bounds.md allows an element of a kernel's results
    (with roundings for eager's own errors) or all of them together, whichever is less; the second, where the
    kernel only sums over rows."""
    inner, outer, dtype = oracle.BOUNDS[DType.float32], oracle.BOUNDS[DType(dtype_of(block))], dtype_of(block)
    spread = oracle.SPREAD * math.sqrt(block.roundings(kernel.startswith("bwd"))) * inner.roundoff
    rows = any(s.what == "store" and s.row() for s in sites(block, kernel))
    element = TIMES * (2 * spread + (1 + outer.element) * outer.roundoff)
    return min(element, ROOT * SHARE[dtype]) if rows else ROOT * SHARE[dtype]


@cache
def dtype_of(block: Block) -> str:
    """Of the results: "float32" or "bfloat16"."""
    return block.manifest["launch"]["interface"]["outputs"][0]["dtype"]


def of_role(block: Block, what: str, *roles: str) -> Iterator[Site]:
    """Loads or stores of buffers that are one of `roles` in every launch: what a caller sees or gives."""
    for kernel in block.texts:
        for site in sites(block, kernel):
            named = site.what == what and site.roles <= set(roles)
            if named and not ("output" in roles and _private(block, site)):
                yield site


def _private(block: Block, site: Site) -> bool:
    """An "output" buffer of a forward plan that is only kept for the backward."""
    for plan, step, _ in block.launches(site.kernel):
        if step["args"][site.argument]["value"] not in (*plan["outputs"], *plan["gradients"]):
            return True
    return False
