"""Reductions in C: interleaved lanes along a row, partial rows in the workspace down the columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from esper_ir.types import Dim, DType
from forge.emit.c_expr import REGISTER, Term
from forge.emit.c_text import Lines, braces, by_runs, simd

LANES = 32


def identity(combine: str, kind: DType) -> str:
    if combine in ("sum", "prod", "squares", "rest"):
        return "1" if combine == "prod" else "0"
    if kind.is_floating:
        return "-__builtin_inff()" if combine == "max" else "__builtin_inff()"
    bits = kind.itemsize * 8
    low, high = (0, 2**bits - 1) if kind is DType.uint8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if kind is DType.bool:
        low, high = 0, 1
    limit = low if combine == "max" else high
    return f"(-INT64_C({-limit - 1}) - 1)" if limit < 0 else f"INT64_C({limit})"


def combined(combine: str, kind: DType, a: str, b: str) -> str:
    if combine in ("sum", "prod"):
        return f"{a} {'+' if combine == 'sum' else '*'} {b}"
    suffix = {DType.float32: "f", DType.float64: "d"}.get(kind, "i")
    return f"{combine}_{suffix}({a}, {b})"


@dataclass(frozen=True)
class Lanes:
    """The accumulators of one row reduction."""

    name: str
    kind: DType
    combine: str
    arg: str

    def declare(self) -> Lines:
        start = identity(self.combine, self.kind)
        return [
            f"{REGISTER[self.kind]} {self.name}[{LANES}];",
            f"for (int l = 0; l < {LANES}; l++) {self.name}[l] = {start};",
        ]

    def add(self, term: Term) -> str:
        lane = f"{self.name}[l]"
        return f"{lane} = {combined(self.combine, self.kind, lane, term.text)};"

    def finish(self) -> Lines:
        """Add the lanes as a binary tree; the result is `result`."""
        steps: Lines = []
        for half in (LANES >> step for step in range(1, LANES.bit_length())):
            # A loop for each half: as one loop over halves it stays a loop, of single elements.
            pair = combined(self.combine, self.kind, f"{self.name}[l]", f"{self.name}[l + {half}]")
            steps += ["#pragma omp simd", f"for (int l = 0; l < {half}; l++) {self.name}[l] = {pair};"]
        return [*steps, f"const {REGISTER[self.kind]} {self.result} = {self.name}[0];"]

    @property
    def result(self) -> str:
        return self.name.replace("a", "s", 1)


def lane_loop(lanes: Sequence[Lanes], body: Lines, sizes: Sequence[Dim] = ()) -> Lines:
    """A sweep with reductions: blocks of `LANES` columns as vectors, then the rest one by one. Where columns
    are walked in runs of parts of these `sizes`, blocks begin anew in each.
    """
    at = lanes[0].name.replace("a", "j", 1)
    whole = bool(sizes) and sizes[-1].multiple({}) % LANES == 0

    def loop(first: str, end: str) -> Lines:
        place = "j" if first == "0" else f"(j - {first})"
        lane = f"const int l = {place} & {LANES - 1};"
        vector = braces(f"for (int l = 0; l < {LANES}; l++)", [f"const int64_t j = {at} + l;", *body])
        rest = braces(f"for (int64_t j = {at}; j < {end}; j++)", [lane, *body])
        return [
            f"int64_t {at} = {first};",
            *braces(f"for (; {at} + {LANES} <= {end}; {at} += {LANES})", ["#pragma omp simd", *vector]),
            *([] if whole else rest),
        ]

    return [
        *(line for lane in lanes for line in lane.declare()),
        *by_runs(sizes, loop),
        *(line for lane in lanes for line in lane.finish()),
    ]


@dataclass(frozen=True)
class Column:
    """The partial row of one column reduction, kept in the workspace itself."""

    name: str
    kind: DType
    combine: str
    place: str

    def declare(self) -> Lines:
        start = identity(self.combine, self.kind)
        ctype = REGISTER[self.kind]
        return [
            f"{ctype} *const {self.name} = {self.place};",
            *simd("0", "cols", [f"{self.name}[j] = {start};"]),
        ]

    def add(self, term: Term) -> str:
        return f"{self.name}[j] = {combined(self.combine, self.kind, f'{self.name}[j]', term.text)};"
