"""What an artifact is made for: `speed`, `memory`, `power`, or `memory-F`, a budget between the first two.

A budget is a share F of the bytes that the backward is handed: 0 is what `memory` keeps, 1 what `speed`
keeps, at the largest sizes to tune for. (torch's `activation_memory_budget` counts the same way.)
"""

from __future__ import annotations

import math

from esper_ir.diagnostics import EXIT_USAGE, EsperError

OBJECTIVES = ("speed", "memory", "power")
"""`memory` keeps the fewest bytes between forward and backward, `power` spends the fewest joules."""
DIGITS = 4


def objective(text: str) -> str:
    """The name in one spelling, "memory-0.50" as "memory-0.5"; E0529 names the known ones, E0550 where a
    budget is no share."""
    name, dash, share = text.partition("-")
    if name not in OBJECTIVES or (dash and name != "memory"):
        hint = f"one of: {', '.join(OBJECTIVES)}, memory-0.5"
        raise EsperError("E0529", f"unknown objective {text!r}", hint=hint, exit_code=EXIT_USAGE)
    return within(share) if dash else name


def within(budget: str) -> str:
    """The objective of a memory budget; E0550 where it is no number from 0 to 1."""
    try:
        share = float(budget)
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        hint = "a number from 0 (the fewest bytes) to 1 (what is fastest)"
        raise EsperError("E0550", f"no memory budget: {budget!r}", hint=hint, exit_code=EXIT_USAGE)
    share = round(share, DIGITS)
    return "memory" if share == 0.0 else "speed" if share == 1.0 else f"memory-{share:g}"


def share_of(aim: str) -> float:
    """Of the bytes between the fewest and those of `speed`, how many may be kept by this objective."""
    name, dash, share = aim.partition("-")
    return float(share) if dash else float(name != "memory")
