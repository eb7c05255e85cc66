"""ScanTile kernels in C: a program takes some columns of one outer row and walks time, the state of every
running value in an array; where time is the last axis the column is one.
"""

from __future__ import annotations

from esper_ir.types import DType
from forge.emit.c_expr import REGISTER, Block, convert
from forge.emit.c_text import Lines, Scope, Text, braces, dim, simd
from forge.plan import Scan, ScanTile, Stmt

START = {"sum": "0", "prod": "1", "recurrence": "0", "logsumexp": "-__builtin_inff()"}
STEP = {"sum": "{h} + {a}", "prod": "{h} * {a}", "recurrence": "{a} * {h} + {b}"}


def scan_tile(text: Text) -> Lines:
    """The loop over programs."""
    tile = text.plan.tile
    assert isinstance(tile, ScanTile)
    scans = [s for s in text.plan.body if isinstance(s, Scan)]
    names = {s.name: f"h{i}" for i, s in enumerate(scans)}
    time = len(text.plan.space) - 2
    states: Lines = []
    for s in scans:
        kind = REGISTER[_state(text, s)]
        states.append(f"{kind} {names[s.name]}[{tile.block}];")
        states += simd("start", "end", [f"{names[s.name]}[j - start] = {START[s.combine]};"])
    inner = Scope(Block(), {}, text.index("j"))
    for s in text.plan.body:
        _statement(text, inner, s, names)
    length = dim(text.plan.space[time])
    loop = f"for (int64_t i{time} = 0; i{time} < length; i{time}++)"
    if scans[0].reverse:
        loop = f"for (int64_t i{time} = length - 1; i{time} >= 0; i{time}--)"
    body = [*text.offsets(), *simd("start", "end", inner.block.lines)]
    return text.parallel(
        [
            f"const int64_t length = {length}, across = (cols + {tile.block - 1}) / {tile.block};",
            f"const int64_t start = p % across * {tile.block};",
            f"const int64_t end = start + {tile.block} < cols ? start + {tile.block} : cols;",
            *_outer(text, time),
            *states,
            *braces(loop, body),
        ]
    )


def _outer(text: Text, time: int) -> Lines:
    """Positions along the axes before time, of the program's row."""
    lines, rest = ["const int64_t r = p / across;"], "r"
    for axis in reversed(range(1, time)):
        size = f"({dim(text.plan.space[axis])})"
        lines.append(f"const int64_t i{axis} = {rest} % {size}, r{axis} = {rest} / {size};")
        rest = f"r{axis}"
    return [*lines, f"const int64_t i0 = {rest};"] if time else [*lines, "(void)r;"]


def _state(text: Text, s: Scan) -> DType:
    """Sums and products run in double: the error of a long one grows with its length."""
    kind = text.dtypes[s.name]
    return DType.float64 if s.combine in ("sum", "prod") and kind.is_floating else kind


def _statement(text: Text, scope: Scope, s: Stmt, names: dict[str, str]) -> None:
    if not isinstance(s, Scan):
        text.statements([s], scope)
        return
    kind, place = text.dtypes[s.name], f"{names[s.name]}[j - start]"
    operands = dict(zip(("a", "b"), (convert(scope.values[a], kind) for a in s.args), strict=False))
    if s.combine == "logsumexp":
        made = _logaddexp(scope, place, operands["a"], kind)
    else:
        made = STEP[s.combine].format(h=place, **operands)
    scope.block.lines.append(f"{place} = {made};")
    scope.values[s.name] = scope.block.let(kind, f"({REGISTER[kind]}){place}")


def _logaddexp(scope: Scope, state: str, value: str, kind: DType) -> str:
    f, infinite = ("_f", "__builtin_inff()") if kind is DType.float32 else ("", "__builtin_inf()")
    top = scope.block.let(kind, f"max_{'f' if f else 'd'}({state}, {value})").text
    total = f"{top} + log{f}(exp{f}({state} - {top}) + exp{f}({value} - {top}))"
    return f"{top} == {infinite} || {top} == -{infinite} ? {top} : {total}"
