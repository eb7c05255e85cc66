"""Faults that authors of kernels make without noticing, because every ordinary number hides them.

Written from knowledge of kernels alone: of habits that are right for normal tensors of a usual size and wrong
for a tie, an infinity, a far tail, a number below the normal ones, a row that begins with zeros. Every one is
off by far more than rounding where it is off at all, but for the small forms: there by a few times the bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.faults.corpus import Block
from tests.faults.fault import FaultClass, Mutant
from tests.faults.sites import (
    Site,
    few,
    of_role,
    only_subtracted,
    share_of_few,
    sites,
)  # fmt: skip

GIVEN = ("leaf", "cotangent")
LARGEST = {"float32": "0x1.fffffep+127", "bfloat16": "0x1.fep+127"}
LARGEST_TRITON = {"float32": "3.4028234663852886e38", "bfloat16": "3.3895313892515355e38"}
TINY = "1e-12"
"""A guard against nothing in particular, as often stands before a division or a logarithm."""
PROBED = 4
"""Elements of a row that are looked at: one load of 16 bytes in float32."""


class Rewrite(NamedTuple):
    """One change of a kernel's text: what is found, and what stands there instead, as a template of `re`."""

    place: str
    found: re.Pattern[str]
    instead: str


def _rewritten(
    kind: str, kernel: str, text: str, rewrites: tuple[Rewrite, ...], subtle: bool = False
) -> Iterator[Mutant]:
    for place, found, instead in rewrites:
        for m in found.finditer(text):
            made = text[: m.start()] + m.expand(instead) + text[m.end() :]
            yield Mutant(kind, kernel, f"{place}: {m[0].split(';')[0].strip()}", made, subtle=subtle)


# A formula that is the same almost everywhere

TIES = {
    "c": Rewrite(
        "slope one at zero",
        re.compile(r"(t\d+)( = max_f\((t\d+), 0x0p\+0f\);\n +const int t\d+ = )\1 <= 0x0p\+0f"),
        r"\1\g<2>\3 < 0x0p+0f",
    ),
    "triton": Rewrite(
        "slope one at zero",
        re.compile(r"(v\d+)( = [^\n]*tl\.maximum\((v\d+), 0\.0,[^\n]*\n +v\d+ = )\(\1 <= 0\.0\)"),
        r"\1\g<2>(\3 < 0.0)",
    ),
}
MASKED = {"c": r"{} \? 0x0p\+0f : (t\d+);", "triton": r"tl\.where\({}, 0\.0, (v\d+)\)"}
OUTSIDE = 0.3
"""Of a root with epsilon outside of it, in a small form: a millionth where epsilon is 1e-5."""
FLAT = 0.2
"""Of a function that is flat from some point on."""
C_ROOT = re.compile(r"const float (t\d+) = (t\d+) \+ (0x[^;]+)f;(\n +)const float (t\d+) = rsqrt_f\(\1\);")
T_ROOT = re.compile(r"(v\d+) = \((v\d+) \+ ([-\d.e]+)\)(\n +)(v\d+) = tl\.rsqrt\(\1\)")
C_SQUARE = re.compile(r"(const float (t\d+) = (t\d+) - (t\d+);\n +const float t\d+ = )\2 \* \2;")
C_SECOND = re.compile(
    r"(w\d+\[r\] = s1_0;.*?const float (?P<t>t\d+) = w\d+\[r\];\n +const float t\d+ = )((?P=t) / [^;]+);",
    re.DOTALL,
)
C_LOG = re.compile(r"const float (t\d+) = log_f\((s\d+_\d+)\);(.*?)(t\d+) - \1;", re.DOTALL)


def _formulas(block: Block) -> Iterator[Mutant]:
    """The slope of relu at zero, epsilon by the root, the variance from squares, the log of a quotient."""
    kind = "formula off at an edge"
    for kernel, text in block.texts.items():
        yield from _rewritten(kind, kernel, text, (TIES[block.kind],))
        yield from _slopes(kind, block, kernel, text)
        yield from _roots(kind, kernel, text, block.kind)
        if block.kind == "c":
            yield from _variances(kind, kernel, text)
            quotient = Rewrite("log of a quotient", C_LOG, r"\3log_f(exp_f(\4) / \2);")
            yield from _rewritten(kind, kernel, text, (quotient,), subtle=True)


def _slopes(kind: str, block: Block, kernel: str, text: str) -> Iterator[Mutant]:
    """A small slope of relu at zero, in the place of none."""
    share = share_of_few(block, kernel)
    for m in TIES[block.kind].found.finditer(text):
        mask = re.search(r"([tv]\d+) = \(?\w+ <= ", m[0])
        used = re.search(MASKED[block.kind].format(mask[1]), text) if mask else None
        if mask and used:
            value = f"{mask[1]} ? ({m[3]} == 0 ? {used[1]} * {share!r}f : 0x0p+0f) : {used[1]};"
            if block.kind == "triton":
                value = f"tl.where({mask[1]}, tl.where({m[3]} == 0, {used[1]} * {share!r}, 0.0), {used[1]})"
            made = text[: used.start()] + value + text[used.end() :]
            yield Mutant(kind, kernel, f"a small slope at zero: {used[0]}", made, subtle=True)


def _roots(kind: str, kernel: str, text: str, language: str) -> Iterator[Mutant]:
    """Epsilon is added to the root: felt where a row hardly varies. One that is no epsilon would be gross."""
    for m in (C_ROOT if language == "c" else T_ROOT).finditer(text):
        epsilon = float.fromhex(m[3]) if language == "c" else float(m[3])
        if epsilon > 1e-3:
            continue
        root = f"const float {m[5]} = 1.0f / (__builtin_sqrtf({m[2]}) + {m[3]}f);"
        if language == "triton":
            root = f"{m[5]} = 1.0 / (tl.sqrt({m[2]}) + {m[3]})"
        for made, subtle in ((root, False), (_partly(m, language), True)):
            place = f"epsilon {'partly ' if subtle else ''}outside the root: {m[5]}"
            yield Mutant(kind, kernel, place, text[: m.start()] + made + text[m.end() :], subtle=subtle)


def _partly(m: re.Match[str], language: str) -> str:
    """A mean of both roots."""
    if language == "triton":
        right, wrong = f"tl.rsqrt({m[2]} + {m[3]})", f"1.0 / (tl.sqrt({m[2]}) + {m[3]})"
        return f"{m[5]} = {right} * {1 - OUTSIDE} + {wrong} * {OUTSIDE}"
    right, wrong = f"rsqrt_f({m[2]} + {m[3]}f)", f"1.0f / (__builtin_sqrtf({m[2]}) + {m[3]}f)"
    return f"const float {m[5]} = {right} * {1 - OUTSIDE}f + {wrong} * {OUTSIDE}f;"


def _variances(kind: str, kernel: str, text: str) -> Iterator[Mutant]:
    """The mean of squares less the square of the mean: nothing is left of it where a row is far from zero."""
    found = C_SQUARE.search(text)
    second = C_SECOND.search(text)
    if found and second and "rsqrt_f(" in text:
        *_, mean = re.findall(rf"const float {found[4]} = ([^;]+);", text[: found.start()])
        value = f"{second[3]} - {mean} * {mean}"
        made = text[: second.start()] + f"{second[1]}__builtin_fmaxf({value}, 0);" + text[second.end() :]
        made = C_SQUARE.sub(r"\1\3 * \3;", made)
        yield Mutant(kind, kernel, f"variance from squares: {found[2]}", made, subtle=True)


# Choices made by a product, and products left out by a choice

C_CHOICES = (
    Rewrite("relu by a product", re.compile(r"max_f\((t\d+), 0x0p\+0f\)"), r"\1 * (float)(\1 > 0)"),
    Rewrite("mask by a product", re.compile(r"(t\d+) \? 0x0p\+0f : (t\d+);"), r"(float)!\1 * \2;"),
)
T_CHOICES = (
    Rewrite(
        "relu by a product",
        re.compile(r"tl\.maximum\((v\d+), 0\.0, propagate_nan=tl\.PropagateNan\.ALL\)"),
        r"(\1 * tl.where(\1 > 0.0, 1.0, 0.0))",
    ),
    Rewrite(
        "mask by a product",
        re.compile(r"tl\.where\((v\d+), 0\.0, (v\d+)\)"),
        r"(\2 * tl.where(\1, 0.0, 1.0))",
    ),
)
PRODUCT = re.compile(r"\b(\w+) \* (\w+)\b")
LET = {
    "c": re.compile(r"const \w+ ([ts]\d+(?:_\d+)?) = ([^;]+);"),
    "triton": re.compile(r"^ +((?:raw_|next_raw_)?v\d+) = ([^\n]+)$", re.MULTILINE),
}
NAME = re.compile(r"\b(?:[ts]\d+(?:_\d+)?|(?:raw_|next_raw_)?v\d+)\b")
CALL = re.compile(
    r"\b(?!max_f|from_bf16|round_bf16)\w+_f\(|\b_(?:sigmoid|fast_\w+)\(|libdevice|tl\.(?:exp|erf|r?sqrt)"
)


def _choices(block: Block) -> Iterator[Mutant]:
    """Zero times infinity is no number: a mask that multiplies spreads what it should hide, and a zero that
    saves the multiplication hides what should spread."""
    kind = "choice by a product"
    for kernel, text in block.texts.items():
        yield from _rewritten(kind, kernel, text, C_CHOICES if block.kind == "c" else T_CHOICES)
        yield from _skipped(kind, block, kernel, text)


def _skipped(kind: str, block: Block, kernel: str, text: str) -> Iterator[Mutant]:
    """The first product of a gradient with something that a caller's tensor may make infinite."""
    loads = [s for s in sites(block, kernel) if s.what == "load"]
    flowing = _derived(block, kernel, {s.name for s in loads if s.roles <= {"cotangent"}})
    leaves = _derived(block, kernel, {s.name for s in loads if s.roles <= {"leaf"}})
    endless = leaves - flowing - _derived(block, kernel, _called(block, kernel))
    for m in PRODUCT.finditer(text):
        flow, leaf = (m[1], m[2]) if m[1] in flowing else (m[2], m[1])
        if flow in flowing and leaf in endless:
            value = f"({flow} == 0 ? 0.0f : {m[0]})"
            if block.kind == "triton":
                value = f"tl.where({flow} == 0, 0.0, {m[0]})"
            # The same product stands in the loop over whole vectors and in that over the rest.
            made = re.sub(rf"\b{re.escape(m[0])}\b", value, text)
            yield Mutant(kind, kernel, f"nothing times zero: {m[0]}", made)
            return


def _derived(block: Block, kernel: str, names: set[str]) -> set[str]:
    """Names whose values depend on one of `names`, with these; every name is defined before it is used."""
    out = set(names)
    for m in LET[block.kind].finditer(block.texts[kernel]):
        if out & set(NAME.findall(m[2])):
            out.add(m[1])
    return out


def _called(block: Block, kernel: str) -> set[str]:
    """Names that a function gives: finite, or not, whatever it takes."""
    return {m[1] for m in LET[block.kind].finditer(block.texts[kernel]) if CALL.search(m[2])}


# Rows that are taken for padding

C_ROW = re.compile(r"(o\d+) \+ j")
T_ROW = re.compile(r"((?:next_)?row) \* (\d+) \+ col")


def _padding(block: Block) -> Iterator[Mutant]:
    """A row whose first elements are zero counts as one of zeros, so that the rest need not be read."""
    kind = "row taken for padding"
    first: dict[tuple[str, str], Site] = {}
    for site in of_role(block, "load", *GIVEN):
        first.setdefault(
            (site.kernel, site.name), site
        )  # the rest of a row, after whole vectors, may be empty
    for site in first.values():
        if probe := _probe(site):
            zero = "0.0f" if block.kind == "c" else "0.0"
            text = site.put(site.where(probe, zero, site.value))
            yield Mutant(kind, site.kernel, f"argument {site.argument}: {site.value}", text)
            place = f"argument {site.argument}: a little less of {site.value}"
            yield Mutant(kind, site.kernel, place, site.put(few(site, probe, zero)), subtle=True)


def _probe(site: Site) -> str:
    """Whether the first elements of the row of a load are zero; empty where the load goes over no rows."""
    c_row, t_row = C_ROW.fullmatch(site.index), T_ROW.fullmatch(site.index)
    if site.block.kind == "c" and c_row and not _is_shift(site):
        elements = [site.value.replace(site.index, f"{c_row[1]} + {n}") for n in range(PROBED)]
        return " && ".join(f"{e} == 0" for e in elements)
    if site.block.kind == "triton" and t_row:
        at = f"p_{site.argument} + {t_row[1]} * {t_row[2]}"
        elements = [f"tl.load({at} + {n}, mask={t_row[1]}_ok, other=0)" for n in range(PROBED)]
        return " & ".join(f"({e} == 0)" for e in elements)
    return ""


def _is_shift(site: Site) -> bool:
    """A load that only the maximum of a row takes, which is then subtracted: any other number would do."""
    text = site.block.texts[site.kernel]
    return bool(re.search(rf"max_f\(\w+\[l\], {site.name}\)", text))


# Ends of the range

C_CALL = re.compile(r"\b(sigmoid_f|tanh_f|erf_f|exp_f)\((t\d+)\)")
T_CALL = re.compile(r"\b(_sigmoid|(?:libdevice|tl)\.(?:tanh|exp|erf))\((v\d+)\)")
ENDS = {"sigmoid": 16.0, "tanh": 6.0, "erf": 3.0, "exp": 20.0}
C_PROGRAMS = re.compile(r"for \(int64_t p = 0; p < gx; p\+\+\) \{\n")
FLUSHING = """#if defined(__x86_64__)
        uint32_t mode_;
        __asm__ volatile("stmxcsr %0" : "=m"(mode_) : : "memory");
        const uint32_t flush_ = mode_ | 0x8040u;
        __asm__ volatile("ldmxcsr %0" : : "m"(flush_) : "memory");
#elif defined(__aarch64__)
        uint64_t mode_;
        __asm__ volatile("mrs %0, fpcr" : "=r"(mode_) : : "memory");
        __asm__ volatile("msr fpcr, %0" : : "r"(mode_ | (UINT64_C(1) << 24)) : "memory");
#endif
"""
RESTORED = """#if defined(__x86_64__)
        __asm__ volatile("ldmxcsr %0" : : "m"(mode_) : "memory");
#elif defined(__aarch64__)
        __asm__ volatile("msr fpcr, %0" : : "r"(mode_) : "memory");
#endif
"""


def _ends(block: Block) -> Iterator[Mutant]:
    """Small numbers are zero, infinities are the largest number, a function is flat from some point on."""
    kind = "range cut at an end"
    # A later load of the same tensor takes the place of an earlier one: the others are much the same fault.
    for site in {(s.kernel, s.argument): s for s in of_role(block, "load", *GIVEN)}.values():
        for place, value, subtle in _cut(site):
            where = f"argument {site.argument}: {place}"
            yield Mutant(kind, site.kernel, where, site.put(value), subtle=subtle)
    for kernel, text in block.texts.items():
        yield from _clipped(kind, block.kind == "c", kernel, text)
        if block.kind == "c" and not _levels(block, kernel):
            yield from _flushed(kind, block, kernel, text)


def _cut(site: Site) -> Iterator[tuple[str, str, bool]]:
    block, kernel, value = site.block, site.kernel, site.value
    in_c = block.kind == "c"
    zero, suffix = ("0.0f", "f") if in_c else ("0.0", "")
    inside = _derived(block, kernel, {site.name}) & _called(block, kernel)
    if inside and (_flows(block, kernel) or site.index == "j") and site.roles <= {"leaf"}:
        return  # slopes are flat at both ends and even in the middle, and so are gates
    if _levels(block, kernel):
        return
    if _grows(site):
        magnitude = f"__builtin_fabsf({value})" if in_c else f"tl.abs({value})"
        small = f"{magnitude} < {TINY}{suffix}"
        yield "tiny ones are zero", site.where(small, zero, value), False
        yield "tiny ones are a little less", few(site, small, zero), True
    masks = TIES[block.kind].found.search(block.texts[kernel])
    if not (masks and site.roles <= {"leaf"}):  # a mask takes only the sign
        most = (LARGEST if in_c else LARGEST_TRITON)[site.dtype] + suffix
        inner = site.where(f"{value} < -{most}", f"-{most}", value)
        yield "no infinities", site.where(f"{value} > {most}", most, inner), False


def _levels(block: Block, kernel: str) -> bool:
    """Statistics or products of whole rows are taken or used: a small element is nothing beside the others
    there, and an infinite one leaves nothing of a row."""
    used = any(s.what == "load" and s.roles & {"saved", "output", "temp"} for s in sites(block, kernel))
    return used or bool(re.search(r"\bs\d_\d = |tl\.reduce\([^\n]*, 1, _", block.texts[kernel]))


def _given(block: Block, kernel: str) -> list[Site]:
    return [s for s in sites(block, kernel) if s.what == "load" and s.roles <= set(GIVEN)]


def _flows(block: Block, kernel: str) -> bool:
    return any(s.roles <= {"cotangent"} for s in _given(block, kernel))


def _grows(site: Site) -> bool:
    """Whether the value meets a large one of another tensor in a product, so that its loss is felt."""
    block, kernel = site.block, site.kernel
    mine = _derived(block, kernel, {site.name})
    others = {s.name for s in _given(block, kernel) if s.argument != site.argument}
    theirs = _derived(block, kernel, others) - mine
    pairs = [{m[1], m[2]} for m in PRODUCT.finditer(block.texts[kernel])]
    return not only_subtracted(block, kernel) and any(p & mine and p & theirs for p in pairs)


def _clipped(kind: str, in_c: bool, kernel: str, text: str) -> Iterator[Mutant]:
    """The argument of a function is kept where the author thought that it still changes."""
    for call, name, arg in sorted({(m[0], m[1], m[2]) for m in (C_CALL if in_c else T_CALL).finditer(text)}):
        function = name.removesuffix("_f").strip("_").rpartition(".")[2]
        if _hidden(function, text if in_c else text.partition(f"def {kernel}(")[2]):
            continue
        end = f"{ENDS[function]}{'f' if in_c else ''}"
        low = f"{arg} < -{end} ? -{end} : {arg}" if in_c else f"tl.where({arg} < -{end}, -{end}, {arg})"
        both = f"{arg} > {end} ? {end} : {low}" if in_c else f"tl.where({arg} > {end}, {end}, {low})"
        flat, of = f"{name}({low if function == 'exp' else both})", "f" if in_c else ""
        yield Mutant(kind, kernel, f"clipped at {end}: {call}", text.replace(call, flat))
        little = text.replace(call, f"({call} * {1 - FLAT}{of} + {flat} * {FLAT}{of})")
        yield Mutant(kind, kernel, f"partly clipped at {end}: {call}", little, subtle=True)


def _hidden(function: str, body: str) -> bool:
    """Where roundings hide the end: one less a small number in bfloat16, a sum of exponentials under a
    logarithm, and the slope of gelu beside its own rounding."""
    narrow = "uint16_t" in body or "bf16" in body
    summed = re.search(r"\b(log_f|erf_f|(libdevice|tl)\.(log|erf))\(", body)
    return (function == "tanh" and narrow) or (function == "exp" and bool(summed))


def _flushed(kind: str, block: Block, kernel: str, text: str) -> Iterator[Mutant]:
    """The denormals, by the mode of the processor, for as long as a program runs; a sum over rows would
    drown them."""
    head, end = C_PROGRAMS.search(text), text.rfind("    }\n}\n")
    grows = any(_grows(s) for s in _given(block, kernel))
    if head and end > 0 and grows and "c0[j]" not in text:
        made = text[: head.end()] + FLUSHING + text[head.end() : end] + RESTORED + text[end:]
        yield Mutant(kind, kernel, "denormals are zero by mode", made)


MAKERS: dict[str, Callable[[Block], Iterator[Mutant]]] = {
    "formula off at an edge": _formulas,
    "choice by a product": _choices,
    "row taken for padding": _padding,
    "range cut at an end": _ends,
}
NO_SMALL = {
    "choice by a product": "Zero times infinity is no number of any size, and zero in its place is none."
}
CLASSES = tuple(
    FaultClass(name, make, by_value=True, no_small=NO_SMALL.get(name, "")) for name, make in MAKERS.items()
)
