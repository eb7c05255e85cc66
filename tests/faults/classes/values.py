"""Faults of what is stored: scaled, cut, constant, copied, right for some values or sizes only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from zlib import crc32

from tests.faults.corpus import Block
from tests.faults.fault import FaultClass, Mutant
from tests.faults.sites import SHARE, SMALL, Site, dtype_of, mixed, of_role, only_subtracted, scale_of, sites

RESULTS = ("output", "gradient")
FAR = 600
"""Rows beyond which loops go round more than once."""
GIVEN = ("leaf", "saved", "cotangent")


Changes = Iterator[tuple[str, str, bool]]


def _each(
    kind: str, change: Callable[[Site], Changes], what: str, *roles: str, no_small: str = "",
    cotangents: tuple[str, ...] = ("normal",),
) -> FaultClass:  # fmt: skip
    """A class that changes the value at every such place: (what was done, new value, subtle) each."""

    def mutants(block: Block) -> Iterator[Mutant]:
        for site in of_role(block, what, *roles):
            for place, value, subtle in change(site):
                where = f"{what} {site.argument}: {place}"
                yield Mutant(kind, site.kernel, where, site.put(value), subtle=subtle)

    return FaultClass(kind, mutants, by_value=True, no_small=no_small, cotangents=cotangents)


def _suffix(site: Site) -> str:
    """Of a float constant."""
    return "f" if site.block.kind == "c" else ""


def _scaled(site: Site, times: float = 1.0) -> str:
    return f"(({site.value}) * {1 + times * SMALL[site.dtype]!r}{_suffix(site)})"


def _wrong_gradient(site: Site) -> Changes:
    yield "scaled", _scaled(site), True
    yield "negated", f"(-({site.value}))", False


def _narrowed(site: Site, bits: int) -> str:
    cut = 16 + bits if site.dtype == "bfloat16" else bits
    if site.block.kind == "c":
        word = f"union {{ float f; uint32_t u; }} q_ = {{ .f = {site.value} }};"
        return f"(__extension__ ({{ {word} q_.u &= {2**32 - 2**cut}u; q_.f; }}))"
    whole = f"(({site.value}).to(tl.float32).to(tl.int32, bitcast=True) & {-(2**cut)})"
    return f"{whole}.to(tl.float32, bitcast=True)"


def _precision(site: Site) -> Changes:
    yield "few bits cut", _narrowed(site, 5 if site.dtype == "float32" else 3), True
    yield "many bits cut", _narrowed(site, 12 if site.dtype == "float32" else 5), False


def _constant(site: Site) -> Changes:
    yield "zero", "0.0f" if site.block.kind == "c" else f"({site.value} * 0.0)", False
    number = 0.25 * scale_of(site.block)
    yield f"a little of {number}", mixed(site, f"{number}{_suffix(site)}"), True


def _by_size(site: Site) -> Changes:
    """Where the number of rows leaves a certain rest, or lies beyond some number."""
    rows = site.rows()
    if rows:
        low, high, by = site.block.rows_of(site.kernel)
        draw = crc32(f"{site.kernel} {site.start} {site.block.name}".encode())
        step, rest = 2 << draw % 4, draw >> 8
        beyond = low + rest % max(1, min(high - 1, 900) - low)
        if by == 1 and high - low > step:
            rare = site.where(f"{rows} % {step} == {rest % step}", _scaled(site), site.value)
            yield f"rows % {step}", rare, True
        if high - beyond > by:
            # Over many rows eager itself is off by a percent in bfloat16: nothing small is a fault there.
            much = f"(({site.value}) * {1 + (0.25 if site.dtype == 'bfloat16' else 1e-3)!r}{_suffix(site)})"
            yield f"rows > {beyond}", site.where(f"{rows} > {beyond}", much, site.value), False


def _sign(site: Site) -> Changes:
    """What came in negative counts as positive, or is slightly off; so [0, 1) shows nothing. A maximum that
    is only subtracted (softmax) may be anything."""
    if only_subtracted(site.block, site.kernel):
        return
    zero = "0" if site.block.kind == "c" else "0.0"
    magnitude = f"__builtin_fabsf({site.value})" if site.block.kind == "c" else f"tl.abs({site.value})"
    yield "magnitude", magnitude, False
    yield "negative ones scaled", site.where(f"{site.value} < {zero}", _scaled(site, 1.5), site.value), True


def _rare(site: Site) -> Changes:
    nan = '__builtin_nanf("")' if site.block.kind == "c" else "float('nan')"
    yield "NaN for zero", site.where(f"{site.value} == 0", nan, site.value), False
    rows = site.rows()
    if rows and site.block.rows_of(site.kernel)[1] > FAR:
        joint = "&&" if site.block.kind == "c" else "&"
        far = f"({site.value} == 0) {joint} ({rows} > {FAR})"
        yield f"NaN for zero, rows > {FAR}", site.where(far, nan, site.value), False


def _constant_flow(site: Site) -> Changes:
    """Off only while the cotangent's first elements are all alike, as for a sum that flows back."""
    joint = " && " if site.block.kind == "c" else " & "
    alike = joint.join(f"({site.element(0)} == {site.element(n)})" for n in (1, 2, 3))
    alike += joint + f"({site.element(0)} != 0)"
    yield "alike", site.where(alike, _scaled(site, 1.2), site.value), True


def _epilogue(site: Site) -> Changes:
    """The last operation before the store left out: its first operand is stored."""
    text, name = site.block.texts[site.kernel], site.value.strip("()")
    for _ in range(4):  # through roundings
        body = re.search(rf"\b{re.escape(name)} = ([^;\n]+)", text)
        operands = re.findall(r"\b[tv]\d+\b", body[1]) if body else []
        if len(set(operands)) == 2 and re.search(r"[tv]\d+\)* [-+*] \(*[tv]\d+", body[1] if body else ""):
            yield "last operation", operands[0], False
            share = SHARE[dtype_of(site.block)] * scale_of(site.block)
            yield "a little of the last operation", mixed(site, operands[0], share), True
            return
        if len(set(operands)) != 1:
            return
        name = operands[0]


def _copied(site: Site) -> Changes:
    """What was loaded from the same place of an input is stored."""
    plain = re.sub(r"\bo\d+\b", "o", site.index)
    for other in sites(site.block, site.kernel):
        same = re.sub(r"\bo\d+\b", "o", other.index) == plain
        given = other.what == "load" and other.roles <= set(GIVEN) and other.name != site.name
        if given and same and other.end < site.start:
            yield f"argument {other.argument}", other.value, False
            share = SHARE[dtype_of(site.block)] * scale_of(site.block)
            yield f"a little of argument {other.argument}", mixed(site, other.value, share), True
            return


CLASSES = (
    _each("gradient of one input wrong", _wrong_gradient, "store", "gradient"),
    _each("scaled result", lambda s: iter([("scaled", _scaled(s), True)]), "store", "output"),
    _each("precision downgrade", _precision, "store", *RESULTS),
    _each("constant output", _constant, "store", *RESULTS),
    _each("size-dependent error", _by_size, "store", *RESULTS),
    _each("right only on [0,1)", _sign, "load", "leaf"),
    _each(
        "NaN on rare input", _rare, "load", "leaf", "cotangent",
        no_small="NaN has no size; a finite error at the same places is another fault.",
    ),
    _each(
        "wrong only for constant cotangents", _constant_flow, "load", "cotangent",
        cotangents=("normal", "ones"),
    ),
    _each("skipped epilogue", _epilogue, "store", *RESULTS),
    _each("output is an input", _copied, "store", *RESULTS),
)  # fmt: skip
