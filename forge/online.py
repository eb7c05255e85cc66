"""A maximum and the sums of exponentials less that maximum, or a mean and the squares about it, from one
reading of a row.

Softmax, logsumexp and cross entropy sum exp(x - max x). Read in blocks, the sum so far is one less the
maximum so far, and is multiplied by exp(old maximum - new maximum) when a block has a larger one: Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018. Of squares about a mean every column of a block
has a mean so far of its own, and the squares about that (Welford 1962); they are put together in the end as
Chan, Golub and LeVeque (1979) do: as exact as a second reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from esper_ir.scalar import Arg, prim
from esper_ir.types import DType
from forge.picked import picked
from forge.plan import Compute, KernelPlan, Phase, Reduce, needed

LESS = prim("exp", prim("sub", Arg(0), Arg(1)))
"""What is summed: of an element and the maximum."""
SQUARES = (prim("mul", Arg(0), Arg(0)), prim("mul", Arg(0), Arg(1)))


@dataclass(frozen=True)
class Below:
    """`total` = sum of exp(x - `top`), `top` = max of x; `guarded`: zero stands where that is infinite."""

    total: Reduce
    top: Reduce
    guarded: bool


@dataclass(frozen=True)
class Squares:
    """`total` = sum of (`value` - `mean`)^2, `mean` = `sum` / columns."""

    total: Reduce
    value: str
    mean: str
    sum: Reduce


@dataclass(frozen=True)
class Online(Phase):
    """A sweep that has sums of the next one too; their maxima, or sums, are among `reduces`."""

    sums: tuple[Below, ...] = ()
    squares: tuple[Squares, ...] = ()


def summed(plan: KernelPlan, r: Reduce) -> Below | None:
    """What a sum is, where it is one of exponentials below a maximum, nothing rounded between."""
    made = {s.name: s for s in plan.body if isinstance(s, Compute)}
    tops = {s.name: s for s in plan.body if isinstance(s, Reduce) and s.axis == "row" and s.combine == "max"}
    dtypes, power = plan.dtypes(), made.get(r.arg)
    if r.axis != "row" or r.combine != "sum" or power is None or power.expr != prim("exp", Arg(0)):
        return None
    less = made.get(power.args[0])
    if less is None or less.expr != prim("sub", Arg(0), Arg(1)) or len(less.args) != 2:
        return None
    inner = _guarded(made, less.args[1])
    top = tops.get(inner or less.args[1])
    kinds = {dtypes[n] for n in (power.name, less.name, *less.args)}
    exact = len(kinds) == 1 and kinds <= {DType.float32, DType.float64}
    alike = top is not None and top.arg == less.args[0] and "c" in plan.axes()[top.arg]
    return Below(r, top, inner is not None) if top is not None and exact and alike else None


def _guarded(made: Mapping[str, Compute], name: str) -> str | None:
    """m, where the name is where(|m| == inf, 0, m)."""
    zero, args = made.get(name), list[str]()
    for expr in (prim("where", Arg(0), 0.0, Arg(1)), prim("eq", Arg(0), math.inf), prim("abs", Arg(0))):
        if zero is None or zero.expr != expr:
            return None
        args, zero = [*args, zero.args[-1]], made.get(zero.args[0])
    return args[0] if args[0] == args[2] else None


def squared(plan: KernelPlan, r: Reduce, block: int) -> Squares | None:
    """What a sum is, where it is one of squares about the mean of a row of whole blocks."""
    made = {s.name: s for s in plan.body if isinstance(s, Compute)}
    power, cols, axes = made.get(r.arg), plan.cols.static, plan.axes()
    if r.axis != "row" or r.combine != "sum" or power is None or not cols or cols % block:
        return None
    away = made.get(power.args[0]) if power.expr in SQUARES and len(set(power.args)) == 1 else None
    if away is None or away.expr != prim("sub", Arg(0), Arg(1)) or len(away.args) != 2:
        return None
    value, mean = away.args
    share = made.get(mean)
    total = next((s for s in plan.body if share and isinstance(s, Reduce) and s.name == share.args[0]), None)
    if share is None or share.expr not in (prim("div", Arg(0), cols), prim("div", Arg(0), float(cols))):
        return None
    alike = total is not None and (total.arg, total.combine, total.axis) == (value, "sum", "row")
    exact = {plan.dtypes()[n] for n in (power.name, away.name, value, mean)} == {DType.float32}
    return Squares(r, value, mean, total) if total and alike and exact and axes[value] == "rc" else None


def _squares(plan: KernelPlan, sweep: Phase, block: int) -> tuple[Squares, ...]:
    return tuple(found for r in sweep.reduces if (found := squared(plan, r, block)) is not None)


def joined(plan: KernelPlan, sweeps: Sequence[Phase], block: int) -> list[Phase]:
    """The sweeps, a maximum's and that of its sums as one: what is left of the second needs no reading.
    `block`: columns that are read at once.
    """
    out: list[Phase] = []
    for sweep in sweeps:
        sums = tuple(found for r in sweep.reduces if (found := summed(plan, r)) is not None)
        squares = () if below(plan) else _squares(plan, sweep, block)
        rest = tuple(r for r in sweep.reduces if r not in [s.total for s in (*sums, *squares)])
        last = out[-1] if out else None
        known = [*(s.top for s in sums), *(s.sum for s in squares)]
        both = last is not None and type(last) is Phase and all(r in last.reduces for r in known)
        if last is None or not known or not both or not all(picked(plan, r) for r in rest):
            out.append(sweep)
            continue
        out[-1] = Online(last.full, last.reduces, last.scalars, sums, squares)
        full = needed(plan, plan.axes(), {r.arg for r in rest})
        out.append(replace(sweep, full=full, reduces=rest))
    return out


def joins(plan: KernelPlan) -> bool:
    """Whether a tile of it may be `online`."""
    return below(plan) or about(plan, 1)


def below(plan: KernelPlan) -> bool:
    """Whether it sums exponentials below a maximum."""
    return any(isinstance(s, Reduce) and summed(plan, s) is not None for s in plan.body)


def about(plan: KernelPlan, block: int) -> bool:
    """Whether it sums squares about a mean, of rows that such blocks divide."""
    return any(isinstance(s, Reduce) and squared(plan, s, block) is not None for s in plan.body)
