"""A maximum and the sums of exponentials less that maximum, from one reading of a row.

Softmax, logsumexp and cross entropy sum exp(x - max x). Read in blocks, the sum so far is one less the
maximum so far, and is multiplied by exp(old maximum - new maximum) when a block has a larger one: Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018.
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


@dataclass(frozen=True)
class Below:
    """`total` = sum of exp(x - `top`), `top` = max of x; `guarded`: zero stands where that is infinite."""

    total: Reduce
    top: Reduce
    guarded: bool


@dataclass(frozen=True)
class Online(Phase):
    """A sweep that has sums of the next one too; their maxima are among `reduces`."""

    sums: tuple[Below, ...] = ()


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


def joined(plan: KernelPlan, sweeps: Sequence[Phase]) -> list[Phase]:
    """The sweeps, a maximum's and that of its sums as one: what is left of the second needs no reading."""
    out: list[Phase] = []
    for sweep in sweeps:
        sums = tuple(found for r in sweep.reduces if (found := summed(plan, r)) is not None)
        rest = tuple(r for r in sweep.reduces if r not in [s.total for s in sums])
        last = out[-1] if out else None
        both = last is not None and type(last) is Phase and all(s.top in last.reduces for s in sums)
        if last is None or not sums or not both or not all(picked(plan, r) for r in rest):
            out.append(sweep)
            continue
        out[-1] = Online(last.full, last.reduces, last.scalars, sums)
        full = needed(plan, plan.axes(), {r.arg for r in rest})
        out.append(replace(sweep, full=full, reduces=rest))
    return out


def joins(plan: KernelPlan) -> bool:
    """Whether a tile of it may be `online`."""
    return any(isinstance(s, Reduce) and summed(plan, s) is not None for s in plan.body)
